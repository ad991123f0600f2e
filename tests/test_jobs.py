"""The job table and its copy on disk, requests and grant documents against their schemas."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.schema import fits, schema
from hypothesis import given
from hypothesis import strategies as st

from torchtuned.config import builtin
from torchtuned.errors import Failed, InvalidRequest
from torchtuned.jobs import MAX_REQUEST, Job, Jobs, State, document, parse_request
from torchtuned.placement import Grant, Rank, Request, place
from torchtuned.placement.documents import request_to_json
from torchtuned.processes import Process
from torchtuned.run.trust import trusted
from torchtuned.topology import Gpu, Topology

MACHINE = Topology(online=frozenset(range(8)), allowed=frozenset(range(8)))


def job(number: int = 1, **changes: Any) -> Job:
    cpus = frozenset({0, 1})
    grant = Grant(cpus=cpus, threads=2, ranks=(Rank(rank=0, cpus=cpus, omp_num_threads=2),), warnings=("near",))
    one = Job(
        id=str(number),
        process=Process(pid=1000 + number, start=5, uid=1000),
        request=Request(command=("python", "x.py"), cpus="2", wait=0.5),
        since=1,
        state=State.RUNNING,
        grant=grant,
        confinement="cpuset",
        scope=f"torchtuned-job-{number}.scope",
        cpu_max=3,
        warnings=("far",),
    )
    return replace(one, **changes)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    table = Jobs(tmp_path / "jobs.json")
    jobs = [job(int(table.new_id())), job(int(table.new_id()), grant=None, state=State.QUEUED, scope="", cpu_max=None)]
    for one in jobs:
        table.put(one)
    again = Jobs(tmp_path / "jobs.json")
    again.load()
    assert list(again) == jobs
    assert again.new_id() == "3"
    again.drop("1")
    last = Jobs(tmp_path / "jobs.json")
    last.load()
    assert list(last) == jobs[1:]


def test_the_file_is_for_root_and_no_link_is_followed(tmp_path: Path) -> None:
    table = Jobs(tmp_path / "jobs.json")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "jobs.new").symlink_to(victim)
    (tmp_path / "jobs.json").symlink_to(victim)
    table.put(job())
    assert victim.read_text() == "precious"
    assert not (tmp_path / "jobs.json").is_symlink()
    assert (tmp_path / "jobs.json").stat().st_mode & 0o777 == 0o600


def test_what_all_may_read_is_written_when_a_place_changes_and_not_when_a_job_does(tmp_path: Path) -> None:
    table = Jobs(tmp_path / "jobs.json")
    table.put(job(state=State.GRANTED, scope=""))
    placed = tmp_path / "placed.json"
    assert [entry["pid"] for entry in json.loads(placed.read_text())["jobs"]] == [1001]
    placed.unlink()
    table.put(job())
    assert not placed.exists()
    table.drop("1")
    assert json.loads(placed.read_text())["jobs"] == []


def test_a_change_that_cannot_be_recorded_does_not_happen(tmp_path: Path) -> None:
    table = Jobs(tmp_path / "jobs.json")
    table.put(job())
    os.mkdir(tmp_path / "jobs.new")
    with pytest.raises(Failed, match="cannot be recorded"):
        table.put(job(2))
    with pytest.raises(Failed):
        table.put(job(state=State.QUEUED))
    assert list(table) == [job()]
    table.drop("1")  # who is gone is gone, whatever the disk says
    assert len(table) == 0
    os.rmdir(tmp_path / "jobs.new")
    table.put(job(3))
    again = Jobs(tmp_path / "jobs.json")
    again.load()
    assert [one.id for one in again] == ["3"]


def test_jobs_dropped_together_cost_one_write(tmp_path: Path) -> None:
    jobs, later = Jobs(tmp_path / "jobs.json"), []
    for number in (1, 2, 3):
        jobs.put(job(number))
    before = jobs.path.stat().st_ino
    jobs.drop("1", soon=later.append)
    jobs.drop("2", soon=later.append)
    assert (len(jobs), len(later), jobs.path.stat().st_ino) == (1, 1, before)
    later.pop()()
    again = Jobs(jobs.path)
    again.load()
    assert [one.id for one in again] == ["3"]
    jobs.drop("3", soon=later.append)
    jobs.put(job(4))  # writes for both
    before = jobs.path.stat().st_ino
    later.pop()()
    assert jobs.path.stat().st_ino == before
    jobs.drop("4")
    assert json.loads(jobs.path.read_text())["jobs"] == []


@pytest.mark.parametrize(
    "change",
    [{"pid": 99999999999999}, {"pid": 0}, {"pid": True}, {"start": -1}, {"start": 1.5}, {"uid": -5}, {"uid": 2**32},
     {"since": -1}, {"since": 2**63}, {"id": "a/b "}, {"id": "0"}, {"id": "9" * 19}, {"id": 1}, {"scope": "\0"},
     {"confinement": None}, {"warnings": ["\ud800"]}, {"cpu_max": 0}, {"state": "sleeping"}],
)  # fmt: skip
def test_what_neither_kernel_nor_bus_would_take_spoils_the_file(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "jobs.json"
    Jobs(path).put(job())
    document = json.loads(path.read_text())
    document["jobs"][0] |= change
    path.write_text(json.dumps(document))
    table = Jobs(path)
    table.load()
    assert (len(table), table.new_id()) == (0, "1")
    assert sorted(os.listdir(tmp_path)) == ["jobs.bad", "placed.json"]


@pytest.mark.parametrize("grant", [{"threads": -1}, {"gpus": ["\0"]}, {"warnings": ["\udfff"]}])
def test_neither_does_a_grant(tmp_path: Path, grant: dict[str, Any]) -> None:
    path = tmp_path / "jobs.json"
    Jobs(path).put(job())
    document = json.loads(path.read_text())
    document["jobs"][0]["grant"] |= grant
    path.write_text(json.dumps(document))
    table = Jobs(path)
    table.load()
    assert (len(table), sorted(os.listdir(tmp_path))) == (0, ["jobs.bad", "placed.json"])


def test_an_id_is_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    Jobs(path).put(job(7))
    table = Jobs(path)
    table.load()
    assert table.new_id() == "8"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"jobs": document["jobs"] * 2}))
    table = Jobs(path)
    table.load()
    assert len(table) == 0


@pytest.mark.parametrize(
    "text",
    ['{"schema":1,"next":1e999,"jobs":[]}', '{"schema":1,"next":-1,"jobs":[]}', "[" * 200_000, "", "{",
     "[]", "{}", '{"schema":2,"next":1,"jobs":[]}', '{"schema":1,"next":"x","jobs":[]}',
     '{"schema":1,"next":1,"jobs":[{"id":"1"}]}', '{"schema":1,"next":1,"jobs":[3]}', "\x00",
     '{"schema":1,"jobs":[]}'],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_kept_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / "jobs.json").write_text(text)
    table = Jobs(tmp_path / "jobs.json")
    table.load()
    assert len(table) == 0
    assert (tmp_path / "jobs.bad").read_text() == text
    table.put(job())


def test_ids_skip_what_is_about(tmp_path: Path) -> None:
    table = Jobs(tmp_path / "jobs.json")
    table.skip_to(7)
    table.skip_to(3)
    assert (table.new_id(), table.new_id()) == ("7", "8")


def test_counts(tmp_path: Path) -> None:
    table = Jobs(tmp_path / "jobs.json")
    table.put(job(1))
    table.put(job(2, process=Process(pid=2, start=1, uid=1001), grant=None, state=State.QUEUED))
    assert (table.of_user(1000), table.of_user(1001), table.of_user(0)) == (1, 1, 0)
    assert table.get("9") is None


def test_request_schema_and_reader_agree() -> None:
    kind = schema("request")
    assert set(kind["properties"]) == set(request_to_json(Request()))
    full = request_to_json(Request(gpus=("0000:01:00.0",), ranks=2, command=("a",), confine="cpuset", wait=1.5))
    for good in (request_to_json(Request()), full, {"schema": 1}):
        assert fits(good, kind)
        parse_request(json.dumps(good))
    for bad in ({"schema": 2}, {"schema": 1, "x": 1}, {"schema": 1, "gpus": "1"}, {"schema": 1, "policy": "best"}):
        assert not fits(bad, kind)
        with pytest.raises(InvalidRequest):
            parse_request(json.dumps(bad))


def test_grant_schema_and_document_agree() -> None:
    kind = schema("grant")
    for one in (job(), job(grant=None, state=State.QUEUED, scope="", confinement="none")):
        made = document(one, MACHINE, builtin())
        assert fits(made, kind), made
        assert set(made) - {"limits", "env_profiles", "bound"} == set(kind["required"])
        trusted(made, MACHINE.online)  # what the wrapper believes
    assert made["warnings"] == ["far"]
    assert document(job(), MACHINE, builtin())["warnings"] == ["near", "far"]


GPUS = tuple(
    Gpu(address=f"0000:{bus:02x}:00.0", vendor="0x10de", device="0x2330", uuid=f"GPU-{bus}") for bus in (1, 2, 0x81)
)


def test_gpus_are_named_by_index_in_pci_order_and_by_uuid() -> None:
    one = job(grant=Grant(cpus=frozenset({0}), gpus=("0000:81:00.0", "0000:01:00.0"), gpus_chosen=True))
    made = document(one, replace(MACHINE, gpus=GPUS), builtin())
    assert (made["gpu_indexes"], made["gpu_uuids"]) == ([2, 0], ["GPU-129", "GPU-1"])
    assert (made["gpus_chosen"], made["gpus_alike"]) == (True, True)
    divided = (replace(GPUS[0], mig=("MIG-1", "MIG-2")), *GPUS[1:])
    made = document(one, replace(MACHINE, gpus=divided), builtin())
    assert (made["gpu_indexes"], made["gpu_uuids"]) == (None, ["GPU-129", "MIG-1", "MIG-2"])
    made = document(one, replace(MACHINE, gpus=GPUS[:1]), builtin())  # one has been pulled out
    assert (made["gpu_indexes"], made["gpu_uuids"]) == (None, None)
    other = (*GPUS, Gpu(address="0000:00:02.0", vendor="0x1002", device="0x1", uuid=""))
    assert document(one, replace(MACHINE, gpus=other), builtin())["gpu_indexes"] == [2, 0]  # CUDA counts NVIDIA's


@pytest.mark.parametrize("driver", ["vfio-pci", "pci-stub", "xen-pciback", "pciback"])
def test_a_gpu_lent_to_a_virtual_machine_has_no_index(driver: str) -> None:
    """CUDA does not count it, so the first GPU that is left is 0: what is chosen, what is named, what is read back."""
    machine = replace(MACHINE, gpus=(replace(GPUS[0], driver=driver), *GPUS[1:]))
    grant = place(machine, [], Request(gpus=1))
    made = document(job(grant=grant), machine, builtin())
    assert (made["gpus"], made["gpu_indexes"], made["gpu_uuids"]) == (["0000:02:00.0"], [0], ["GPU-2"])
    again = place(machine, [], Request(cuda_visible_devices="0"))
    assert again.gpus == grant.gpus
    assert document(job(grant=again), machine, builtin())["gpu_indexes"] == [0]
    unlike = replace(machine, gpus=(replace(machine.gpus[0], device="0x1eb8"), *GPUS[1:]))
    assert document(job(grant=grant), unlike, builtin())["gpus_alike"]
    lent = job(grant=Grant(cpus=frozenset({0}), gpus=("0000:01:00.0",)))
    assert document(lent, machine, builtin())["gpu_indexes"] is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = st.sampled_from(sorted(request_to_json(Request())))


@given(st.dictionaries(KEYS, JSON) | JSON)
def test_no_document_does_more_than_be_refused(value: Any) -> None:
    try:
        found = parse_request(json.dumps(value))
    except InvalidRequest:
        return
    assert parse_request(json.dumps(request_to_json(found))) == found


@given(st.text())
def test_no_text_does_more_than_be_refused(text: str) -> None:
    try:
        parse_request(text)
    except InvalidRequest:
        return
    assert isinstance(json.loads(text), dict)


LARGE = (" " * (MAX_REQUEST + 1), "é" * (MAX_REQUEST // 2 + 1))


@pytest.mark.parametrize("text", ["[" * 60000, '{"a":' * 10000, "9" * 6000, *LARGE])
def test_deep_long_and_large(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(text)
