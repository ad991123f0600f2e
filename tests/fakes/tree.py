"""Small machines for tests: a folder of files that stands for /."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def make_tree(folder: Path, files: Mapping[str, str | bytes | None]) -> Path:
    """Write the files ("sys/devices/system/cpu/online": "0-3\\n"); None makes a folder, "-> X" a link to X."""
    for name, content in files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(content)
    return folder
