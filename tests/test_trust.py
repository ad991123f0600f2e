"""Nothing a hostile owner of the bus name can say gets through, except places within this process's own mask."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from fakes.fuzz import often
from hypothesis import given
from hypothesis import strategies as st

from torchtuned.cpuset import parse_list
from torchtuned.errors import Failed
from torchtuned.run.trust import trusted

MASK = frozenset(range(8))
GOOD: dict[str, Any] = {
    "schema": 1,
    "job": "7",
    "state": "granted",
    "cpus": "0-3",
    "memory_nodes": "0",
    "gpus": ["0000:01:00.0"],
    "shared": False,
    "threads": 4,
    "confinement": "affinity",
    "scope": "torchtuned-job-7.scope",
    "ranks": [{"rank": 0, "gpu": None, "cpus": "0-3", "memory_nodes": "0", "omp_num_threads": 4, "reasons": ["why"]}],
    "warnings": [],
    "reasons": [],
    "omp_max_gpu": 8,
    "gpus_chosen": True,
    "gpu_indexes": [0],
    "gpu_uuids": ["GPU-5a0c1e5e-0000-1111-2222-333344445555"],
}


def test_a_good_grant_comes_back_whole() -> None:
    assert trusted(GOOD, MASK) == {**GOOD, "cpu_max": None, "gpus_alike": False, "limits": {}, "env_profiles": []}
    more = {"cpu_max": 2, "gpus_alike": True, "limits": {"core": "0", "oom_score_adj": "-5"}, "env_profiles": ["cpu"]}
    assert trusted({**GOOD, **more}, MASK) == {**GOOD, **more}


def test_unknown_fields_are_dropped() -> None:
    assert "environment" not in trusted({**GOOD, "environment": {"LD_PRELOAD": "/tmp/x.so"}}, MASK)


def test_queued_needs_no_place() -> None:
    queued = trusted({**GOOD, "state": "queued", "cpus": "", "threads": 0, "ranks": []}, MASK)
    assert queued["state"] == "queued"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 2),
        ("schema", None),
        ("job", ""),
        ("job", "../1"),
        ("job", 7),
        ("state", "done"),
        ("cpus", "0-8"),
        ("cpus", ""),
        ("cpus", "0-99999999999"),
        ("cpus", "0;rm"),
        ("cpus", None),
        ("cpus", "0," * 30000),
        ("memory_nodes", "x"),
        ("gpus", ["0000:01:00.0; rm"]),
        ("gpus", ["../../etc"]),
        ("gpus", "0000:01:00.0"),
        ("gpus", ["0000:01:00.0"] * 300),
        ("shared", 1),
        ("threads", 0),
        ("threads", True),
        ("threads", 1e9),
        ("threads", 10**9),
        ("confinement", "jail"),
        ("scope", "ssh.service"),
        ("scope", "torchtuned-job-/../x.scope"),
        ("ranks", {}),
        ("ranks", [None]),
        ("ranks", [{**GOOD["ranks"][0], "cpus": "4"}]),
        ("ranks", [{**GOOD["ranks"][0], "omp_num_threads": "4"}]),
        ("ranks", [{**GOOD["ranks"][0], "gpu": "x"}]),
        ("ranks", [GOOD["ranks"][0]] * 5000),
        ("warnings", [1]),
        ("warnings", ["x"] * 1000),
        ("limits", {"nproc": "1"}),
        ("limits", {"nofile": 3}),
        ("limits", {"nofile": "soft"}),
        ("env_profiles", ["LD_PRELOAD"]),
        ("gpu_indexes", ["0"]),
        ("gpu_indexes", [-1]),
        ("gpu_uuids", ["GPU-a\nLD_PRELOAD=/tmp/x"]),
        ("gpu_uuids", ["/tmp/x"]),
        ("gpu_uuids", [f"GPU-{'a' * 200}"]),
    ],
)
def test_bad_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(Failed) as caught:
        trusted({**GOOD, field: value}, MASK)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("document", [None, [], "grant", 3])
def test_not_an_object(document: object) -> None:
    with pytest.raises(Failed):
        trusted(document, MASK)


def test_text_is_fit_for_a_terminal() -> None:
    warnings = trusted({**GOOD, "warnings": ["\x1b]0;owned\x07\nnext", "x" * 9999]}, MASK)["warnings"]
    assert warnings == ["?]0;owned??next", "x" * 500]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@often(300)
@given(field=st.sampled_from(sorted(GOOD)), value=JSON)
def test_whatever_comes_is_refused_or_within_the_mask(field: str, value: object) -> None:
    document = copy.deepcopy(GOOD)
    document[field] = value
    try:
        grant = trusted(document, MASK)
    except Failed:
        return
    assert parse_list(str(grant["cpus"])) <= MASK
    json.dumps(grant)
