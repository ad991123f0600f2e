"""torchtuned-run --explain: what a command would get, and why, for people and as JSON."""

from __future__ import annotations

import json

from torchtuned.wording import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from torchtuned.environment import Decision

SCHEMA = 1
KEYS = ("cpus", "memory_nodes", "gpus", "shared", "threads", "confinement", "ranks", "reasons")


def text(
    grant: Mapping[str, Any], by: str, decisions: Mapping[str, Decision], notes: Sequence[str], *, as_json: bool
) -> str:
    """The answer of `torchtuned place --json` with "environment" and "by"; or lines for people."""
    warnings = list(dict.fromkeys([*grant["warnings"], *notes]))
    if as_json:
        document = {"schema": SCHEMA, "by": by, **{key: grant[key] for key in KEYS}, "warnings": warnings}
        document["environment"] = {
            name: {"value": decision.value, "action": decision.action, "reason": decision.reason}
            for name, decision in sorted(decisions.items())
        }
        return json.dumps(document, indent=2, ensure_ascii=True)
    lines = [f"Placed by {by}: {count(grant['threads'], 'thread')} on CPUs {grant['cpus']}{_how(grant)}"]
    lines += [f"  {reason}" for reason in grant["reasons"]]
    for rank in grant["ranks"]:
        gpu = f"GPU {rank['gpu']}" if rank["gpu"] else "no GPU"
        node = f"node {rank['memory_nodes']}" if rank["memory_nodes"] else "no node"
        threads = count(rank["omp_num_threads"], "thread")
        lines.append(f"Rank {rank['rank']}: {gpu}, {node}, CPUs {rank['cpus']}, {threads}")
        lines += [f"  {reason}" for reason in rank["reasons"]]
    lines.append("Environment:")
    for name, decision in sorted(decisions.items()):
        value = f"={decision.value}" if decision.value is not None else ""
        lines.append(f"  {decision.action:<7} {name}{value}  ({decision.reason})")
    lines += [f"Warning: {warning}" for warning in warnings]
    return "\n".join(lines)


def _how(grant: Mapping[str, Any]) -> str:
    how = {"cpuset": ", kept there by a cpuset", "affinity": ", kept there by affinity", "none": ", not kept there"}
    return how[grant["confinement"]] + (", shared with other jobs" if grant["shared"] else "")
