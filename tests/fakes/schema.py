"""The JSON schemas that the package ships, and whether a document is as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parents[2] / "share/torchtuned/schemas"


def schema(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text())
    return document


def fits(value: Any, kind: Any) -> bool:
    """Whether a document is of a kind: enough of JSON Schema for ours."""
    if isinstance(kind, bool):
        return kind
    if "const" in kind:
        return bool(value == kind["const"])
    if "enum" in kind:
        return value in kind["enum"]
    if "oneOf" in kind:
        return sum(fits(value, one) for one in kind["oneOf"]) == 1
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    names = kind["type"] if isinstance(kind["type"], list) else [kind["type"]]
    if not any(value is None if n == "null" else isinstance(value, types[n]) for n in names):  # type: ignore[arg-type]
        return False
    if isinstance(value, bool) and "boolean" not in names:
        return False
    if isinstance(value, list) and "items" in kind:
        return all(fits(item, kind["items"]) for item in value)
    if isinstance(value, dict):
        known = kind.get("properties", {})
        more = kind.get("additionalProperties", True)
        return set(kind.get("required", ())) <= set(value) and all(
            fits(item, known[key] if key in known else more) for key, item in value.items()
        )
    return True
