"""What holds for every machine, every request and every history of jobs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torchtuned.errors import Busy, TorchtunedError, Unplaceable
from torchtuned.placement import grant_from_json, grant_to_json, place
from torchtuned.placement.grants import Grant, Request, Rules
from torchtuned.topology import Core, Gpu, Node, Topology
from torchtuned.words import POLICIES

KEEP = settings(derandomize=True, deadline=None, max_examples=200)
Story = tuple[Topology, list[tuple[Request, list[Grant], Grant]]]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to 24 cores of 1 to 4 threads on up to 4 nodes, some of them without CPUs, with caches and GPUs anywhere."""
    count, threads = draw(st.integers(1, 24)), draw(st.sampled_from([1, 2, 4]))
    adjacent = draw(st.booleans())
    cores = []
    for i in range(count):
        cpus = range(i * threads, (i + 1) * threads) if adjacent else range(i, count * threads, count)
        cores.append(Core(cpus=frozenset(cpus), kind=draw(st.sampled_from([0, 0, 0, 1]))))
    online = frozenset(cpu for core in cores for cpu in core.cpus)
    homes = draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count))  # -1: a CPU without a node
    ids = draw(st.sampled_from([(0, 1, 2, 3), (0, 8, 33, 250)]))
    members: list[set[int]] = [set() for _ in range(draw(st.integers(max(homes) + 1, 4)))]
    for core, home in zip(cores, homes, strict=True):
        if home >= 0:
            members[home] |= core.cpus
    nodes = [Node(id=ids[n], cpus=frozenset(cpus)) for n, cpus in enumerate(members)]
    gpus = []
    for i in range(draw(st.integers(0, 5))):
        local = draw(st.sampled_from([*(node.cpus for node in nodes), online, frozenset()]))
        address, locality = f"0000:{i + 1:02x}:00.0", "numa_node" if local else "unknown"
        gpus.append(Gpu(address=address, vendor="0x10de", device="1", local_cpus=local, locality=locality))
    size = draw(st.integers(1, 8))
    first = frozenset(cpu for core in cores[: draw(st.integers(1, count))] for cpu in core.cpus)
    caches = [cores[i : i + size] for i in range(0, count, size)]
    allowed = draw(st.sampled_from([online, online, online - {0}])) or online
    return Topology(
        online=online,
        allowed=allowed,
        allowed_nodes=frozenset(node.id for node in nodes),
        isolated=draw(st.sampled_from([frozenset(), frozenset({max(online)})])),
        cores=tuple(cores),
        packages=(first, online - first) if first < online else (online,),
        llc=tuple(frozenset(cpu for core in cache for cpu in core.cpus) for cache in caches),
        nodes=tuple(nodes),
        gpus=tuple(gpus),
    )


@st.composite
def requests(draw: st.DrawFn, machine: Topology) -> Request:
    names = tuple(gpu.address for gpu in machine.gpus)
    gpus = draw(
        st.one_of(
            st.none(),
            st.just(()),
            st.integers(0, 3),
            st.lists(st.sampled_from(names), unique=True, max_size=4).map(tuple) if names else st.just(()),
        )
    )
    return Request(
        gpus=gpus,
        cuda_visible_devices=draw(st.sampled_from([None, None, "", "0", "1,0", "7"])),
        ranks=draw(st.one_of(st.none(), st.integers(1, 9))),
        policy=draw(st.sampled_from(POLICIES)),
        cpus=draw(st.sampled_from([None, None, None, "1", "2", "3", "50%", "node", "all"])),
        shared=draw(st.sampled_from([False, False, False, True])),
        affinity=draw(st.one_of(st.none(), st.frozensets(st.sampled_from(sorted(machine.online)), min_size=1))),
        cpu_max=draw(st.sampled_from([None, None, 1, 3])),
    )


@st.composite
def histories(draw: st.DrawFn) -> Story:
    """A machine and, for each job that found a place, its request, the grants before it, and its own."""
    machine = draw(topologies())
    rules = Rules(slots=draw(st.sampled_from([0, 0, 3])), reserved=draw(st.sampled_from([frozenset(), frozenset({1})])))
    jobs: list[Grant] = []
    history = []
    for _ in range(draw(st.integers(1, 6))):
        request = draw(requests(machine))
        try:
            grant = place(machine, jobs, request, rules)
        except (Busy, Unplaceable):
            continue
        assert place(machine, list(jobs), request, rules) == grant  # deterministic
        history.append((request, list(jobs), grant))
        jobs.append(grant)
        if draw(st.booleans()) and len(jobs) > 1:
            jobs.pop(draw(st.integers(0, len(jobs) - 1)))
    return machine, history


@KEEP
@given(histories())
def test_every_grant_is_sound(story: Story) -> None:
    machine, history = story
    for request, before, grant in history:
        allowed = machine.allowed & (request.affinity if request.affinity is not None else machine.allowed)
        assert grant.cpus
        assert grant.cpus <= allowed
        assert grant.cpus == frozenset().union(*(rank.cpus for rank in grant.ranks))
        assert [rank.rank for rank in grant.ranks] == list(range(len(grant.ranks)))
        assert all(rank.cpus and rank.omp_num_threads >= 1 for rank in grant.ranks)
        assert grant.memory_nodes <= machine.allowed_nodes
        if request.ranks is not None:
            assert len(grant.ranks) == request.ranks
        if not grant.bound:
            continue
        for core in machine.cores:
            for cpus in (grant.cpus, *(rank.cpus for rank in grant.ranks)):
                assert cpus & core.cpus in (frozenset(), allowed & core.cpus)  # cores stay whole
        touched = frozenset(cpu for core in machine.cores if core.cpus & grant.cpus for cpu in core.cpus)
        if not grant.shared:
            assert not any(other.bound and other.cpus & touched for other in before)
        elif not request.shared:
            assert grant.warnings
        leased = {address for other in before for address in other.gpus}
        if isinstance(request.gpus, int) or (isinstance(request.gpus, tuple) and not request.shared):
            assert not leased & set(grant.gpus)


@KEEP
@given(histories())
def test_sharing_means_that_nothing_was_free(story: Story) -> None:
    machine, history = story
    for request, before, grant in history:
        if not grant.shared or request.shared or not grant.bound or any("isolated" in w for w in grant.warnings):
            continue
        taken = frozenset().union(*(other.cpus for other in (*before, grant) if other.bound))
        kept = machine.isolated | {1}
        allowed = machine.allowed & (request.affinity if request.affinity is not None else machine.allowed)
        free = [core for core in machine.cores if core.cpus & allowed and not core.cpus & (taken | kept)]
        assert not free


@KEEP
@given(histories())
def test_ranks_of_a_job_meet_only_where_it_is_said(story: Story) -> None:
    _, history = story
    for request, _, grant in history:
        if request.policy != "exclusive" or not grant.bound or grant.shared:
            continue
        if sum(len(rank.cpus) for rank in grant.ranks) > len(grant.cpus):
            assert "there are fewer cores than ranks, so some ranks share a core" in grant.warnings


@KEEP
@given(histories())
def test_a_grant_survives_its_document(story: Story) -> None:
    for _, _, grant in story[1]:
        assert grant_from_json(grant_to_json(grant)) == grant


@KEEP
@given(topologies(), st.data())
def test_errors_say_what_and_where(machine: Topology, data: st.DataObject) -> None:
    errors: list[TorchtunedError] = []
    try:
        place(machine, [], data.draw(requests(machine)))
    except TorchtunedError as error:
        errors.append(error)
    assert all(error.what and error.where for error in errors)
