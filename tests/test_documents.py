"""The JSON forms, against the schemas that the package ships, and against everything that may come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.fuzz import often
from fakes.tree import gpu_addresses, machine_a, make_tree
from hypothesis import given
from hypothesis import strategies as st

from torchtuned import discover
from torchtuned.cpuset import parse_list
from torchtuned.errors import InvalidRequest
from torchtuned.host import Host
from torchtuned.placement import place
from torchtuned.placement.documents import (
    answer,
    grant_from_json,
    grant_to_json,
    grants_in_force,
    request_from_json,
    request_to_json,
    topology_document,
)
from torchtuned.placement.grants import Request
from torchtuned.words import CONFINE, MEMORY, POLICIES

SCHEMAS = Path(__file__).resolve().parents[1] / "share/torchtuned/schemas"


def test_a_request_and_its_schema_have_the_same_words() -> None:
    schema = json.loads((SCHEMAS / "request.json").read_text())
    document = request_to_json(Request())
    assert set(schema["properties"]) == set(document)
    assert not schema["additionalProperties"]
    assert tuple(schema["properties"]["policy"]["enum"]) == POLICIES
    assert tuple(schema["properties"]["memory"]["enum"]) == MEMORY
    assert tuple(schema["properties"]["confine"]["enum"]) == (None, *CONFINE)


def test_a_grant_has_the_words_of_its_schema(tmp_path: Path) -> None:
    schema = json.loads((SCHEMAS / "grant.json").read_text())
    grant = place(discover.topology(Host(make_tree(tmp_path, machine_a()))), [], Request(gpus=2))
    document = grant_to_json(grant)
    added = {"job", "state", "confinement", "scope", "cpu_max", "omp_max_gpu", "gpus_alike", "gpu_indexes", "gpu_uuids"}
    assert set(schema["required"]) - added <= set(document)
    assert set(schema["properties"]["ranks"]["items"]["required"]) == set(document["ranks"][0])


WORDS = st.text(max_size=20)


@often(100)
@given(
    st.builds(
        Request,
        gpus=st.one_of(st.none(), st.integers(0, 64), st.lists(WORDS, max_size=4).map(tuple)),
        cuda_visible_devices=st.none() | WORDS,
        cuda_device_order=st.none() | WORDS,
        ranks=st.none() | st.integers(1, 4096),
        policy=st.sampled_from(POLICIES),
        cpus=st.none() | WORDS,
        shared=st.booleans(),
        memory=st.sampled_from(MEMORY),
        confine=st.sampled_from([None, *CONFINE]),
        wait=st.none() | st.integers(0, 1000) | st.floats(0, 1000),
        command=st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"])), max_size=5).map(tuple),
    )
)
def test_a_request_survives_its_document(request: Request) -> None:
    assert request_from_json(json.loads(json.dumps(request_to_json(request)))) == request


def test_an_empty_request_is_the_default() -> None:
    assert request_from_json({}) == Request()


@pytest.mark.parametrize("sign", ["\0", "\n", "\x1b", "\x7f", "\x9f", "\ud800"])
def test_a_command_that_cannot_be_shown_is_refused(sign: str) -> None:
    with pytest.raises(InvalidRequest, match=r"request\.command"):
        request_from_json({"command": ["python", f"a{sign}"]})
    assert request_from_json({"command": ["größe", "\xa0", "\U0001f680"]})


def test_a_long_command_is_cut_for_display() -> None:
    document = request_to_json(Request(command=("x" * 1000,) * 100))
    assert (len(document["command"]), len(document["command"][0])) == (64, 256)
    assert request_from_json(document).command == ("x" * 256,) * 64


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "request: 'None' does not do (an object)"),
        ([], "request: '[]' does not do (an object)"),
        ({"colour": 1, "affinity": "0"}, "request: not known: affinity, colour (known are schema, command, gpus, "),
        ({"schema": 2}, "request.schema 2: another version (this is 1)"),
        ({"schema": "1"}, "request.schema: '1' does not do (a whole number)"),
        ({"gpus": True}, "request.gpus: 'True' does not do"),
        ({"gpus": -1}, "request.gpus: '-1' does not do"),
        ({"gpus": 1.5}, "request.gpus: '1.5' does not do"),
        ({"gpus": [1]}, "request.gpus: '[1]' does not do (a list of texts)"),
        ({"gpus": "all"}, "request.gpus: 'all' does not do"),
        ({"ranks": 0}, "request.ranks: '0' does not do (from 1 to 4096, or null)"),
        ({"ranks": "2"}, "request.ranks: '2' does not do (a whole number, or null)"),
        ({"ranks": True}, "request.ranks: 'True' does not do"),
        ({"policy": "best"}, "request.policy: 'best' does not do (one of exclusive, node, socket, core-complex)"),
        ({"policy": ["node"]}, "request.policy: "),
        ({"memory": 3}, "request.memory: '3' does not do (one of local"),
        ({"confine": "jail"}, "request.confine: 'jail' does not do (one of cpuset, affinity, none)"),
        ({"cpus": 4}, "request.cpus: '4' does not do (a text, or null)"),
        ({"shared": 1}, "request.shared: '1' does not do (true or false)"),
        ({"wait": -1}, "request.wait: '-1' does not do"),
        ({"wait": True}, "request.wait: 'True' does not do"),
        ({"wait": float("nan")}, "request.wait: 'nan' does not do"),
        ({"command": "train.py"}, "request.command: 'train.py' does not do (a list of texts)"),
        ({"command": ["x"] * 65}, "request.command: too long"),
        ({"command": ["x" * 257]}, "request.command: too long"),
        ({"cuda_visible_devices": 0}, "request.cuda_visible_devices: '0' does not do (a text, or null)"),
    ],
)
def test_requests_that_do_not_do(document: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        request_from_json(document)
    assert message in str(error.value)


def test_grants_come_from_a_file_in_any_form_that_place_or_the_daemon_writes(tmp_path: Path) -> None:
    found = discover.topology(Host(make_tree(tmp_path, machine_a())))
    grant = place(found, [], Request(gpus=(gpu_addresses(1)[0],)))
    wire = {**grant_to_json(grant), "job": "7", "state": "running", "scope": "", "from_a_newer_version": {}}
    short = {"cpus": "0-3,16-19", "ranks": [{"cpus": "0-3,16-19", "gpu": gpu_addresses(1)[0]}]}
    for document in (answer(grant), wire, short):
        (read,) = grants_in_force(json.loads(json.dumps([document])))
        assert (read.cpus, read.gpus) == (grant.cpus, grant.gpus)
    (least,) = grants_in_force([{"cpus": "0-3"}])
    assert (least.cpus, least.gpus, least.shared, least.bound) == (parse_list("0-3"), (), False, True)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"cpus": "0"}, "grants in force: "),
        (["0-3"], "grant: '0-3' does not do (an object)"),
        ([{}], "grant.cpus: 'None' does not do (a CPU list such as 0-3,8)"),
        ([{"cpus": "3-0"}], "grant.cpus: '3-0' does not do"),
        ([{"cpus": [0]}], "grant.cpus: '[0]' does not do"),
        ([{"cpus": "0", "ranks": {}}], "grant.ranks: "),
        ([{"cpus": "0", "ranks": [{"cpus": "x"}]}], "grant.ranks[0].cpus: 'x' does not do"),
        ([{"cpus": "0", "ranks": [{"cpus": "0", "gpu": 1}]}], "grant.ranks[0].gpu: '1' does not do"),
        ([{"cpus": "0", "shared": "no"}], "grant.shared: 'no' does not do (true or false)"),
        ([{"cpus": "0", "gpus": "x"}], "grant.gpus: 'x' does not do (a list of texts)"),
    ],
)
def test_grants_that_do_not_do(document: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        grants_in_force(document)
    assert message in str(error.value)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@often(100)
@given(JSON, st.sampled_from(sorted(request_to_json(Request()))), st.sampled_from(["cpus", "ranks", "gpus", "shared"]))
def test_no_document_ends_in_anything_but_a_value_or_invalid_request(value: Any, word: str, part: str) -> None:
    """Whatever stands where a request or a grant should, or as any one value of it."""
    refused = 0
    for read, document in (
        (request_from_json, value),
        (request_from_json, {word: value}),
        (grant_from_json, value),
        (grant_from_json, {"cpus": "0", part: value}),
    ):
        try:
            read(document)
        except InvalidRequest:
            refused += 1
    assert refused >= (0 if isinstance(value, dict) else 2)


def test_the_topology_document(tmp_path: Path) -> None:
    files = {**machine_a(gpus=(1, -1)), "sys/devices/system/node/node7/cpulist": "\n"}
    document = topology_document(discover.topology(Host(make_tree(tmp_path, files))))
    assert json.loads(json.dumps(document)) == document
    assert document["schema"] == 1
    assert document["online"] == document["allowed_cpus"] == "0-31"
    assert document["cores"][:2] == ["0,16", "1,17"]
    assert document["packages"] == document["l3"] == ["0-7,16-23", "8-15,24-31"]
    assert document["node_cpus"] == {"0": "0-7,16-23", "1": "8-15,24-31", "7": ""}
    assert document["nodes_without_cpus"] == [7]
    first, second = gpu_addresses(2)
    assert document["gpus"][first] == {
        "vendor": "0x10de",
        "device": "0x20b0",
        "numa_node": 1,
        "local_cpus": "8-15,24-31",
        "locality": "numa_node",
        "driver": "",
        "uuid": "",
        "name": "",
    }
    assert document["gpus"][second]["numa_node"] is None
    assert (document["gpus"][second]["locality"], document["gpus"][second]["local_cpus"]) == ("unknown", "")


def test_the_answer_of_place(tmp_path: Path) -> None:
    found = discover.topology(Host(make_tree(tmp_path, machine_a())))
    document = answer(place(found, [], Request(gpus=(gpu_addresses(1)[0],))))
    assert document == {
        "schema": 1,
        "cpus": "0-3,16-19",
        "memory_nodes": "0",
        "gpus": ["0000:10:00.0"],
        "shared": False,
        "bound": True,
        "threads": 4,
        "ranks": [
            {
                "rank": 0,
                "gpu": "0000:10:00.0",
                "cpus": "0-3,16-19",
                "memory_nodes": "0",
                "omp_num_threads": 4,
                "reasons": ["GPU 0000:10:00.0 (on node 0): 4 of the 8 cores there, divided among 2 GPUs"],
            }
        ],
        "warnings": [],
        "reasons": [],
    }
