from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes.fuzz import often
from hypothesis import given
from hypothesis import strategies as st

from torchtuned import config
from torchtuned.config import load
from torchtuned.config_keys import SECTIONS
from torchtuned.errors import InvalidConfig

TOP = Path(__file__).resolve().parent.parent
CONF = TOP / "etc/torchtuned/torchtuned.conf"
SHIPPED = sorted((TOP / "share/torchtuned/profiles").glob("*.conf"))


def wishes(*texts: str) -> dict[str, tuple[str, str, str]]:
    merged = load([(f"/etc/{number}.conf", text) for number, text in enumerate(texts)])
    return {wish.knob: (str(wish.value), wish.when, wish.source) for wish in merged.wishes}


def faults(text: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load([("/etc/a.conf", text)])
    return str(caught.value).splitlines()


def test_the_last_file_wins_and_says_so() -> None:
    merged = load([("/a", "[sysctl]\nvm.swappiness = 20\n"), ("/b", "\n[sysctl]\n# why\nvm/swappiness = <=10\n")])
    (wish,) = merged.wishes
    assert (wish.knob, str(wish.value), wish.source) == ("sysctl/vm.swappiness", "<=10", "/b:4")
    (setting,) = [setting for setting in merged.settings if setting.key == "vm.swappiness"]
    assert (setting.value, setting.source, setting.overrides) == ("<=10", "/b:4", (("20", "/a:2"),))
    (default,) = [setting for setting in merged.settings if setting.key == "when_full"]
    assert (default.value, default.source) == ("share", "default")


def test_every_knob_says_when() -> None:
    found = wishes(
        "[policy]\nwhen = jobs\n[cpu]\ngovernor = performance\nboost = on @boot\nlatency_us = 20\n"
        "[memory]\nwhen = boot\ntransparent_hugepage = madvise\n[gpu]\npersistence_mode = yes\n"
    )
    assert {knob: when for knob, (_, when, _) in found.items()} == {
        "cpu/*/governor": "jobs",
        "cpu/*/boost": "boot",
        "latency/cpu_dma_latency": "jobs",
        "memory/transparent_hugepage": "boot",
        "gpu/*/persistence_mode": "jobs",
    }
    assert found["gpu/*/persistence_mode"][0] == "on"
    assert found["latency/cpu_dma_latency"][0] == "<=20"
    assert wishes("[cpu]\nlatency_us = 20\n")["latency/cpu_dma_latency"][1] == "jobs"


def test_a_later_file_may_say_when_for_all() -> None:
    assert wishes("[sysctl]\nvm.swappiness = 1\n", "[policy]\nwhen = jobs\n")["sysctl/vm.swappiness"][1] == "jobs"


def test_battery_by_section() -> None:
    def keeps(text: str) -> dict[str, bool]:
        return {wish.knob: wish.keep_on_battery for wish in load([("/a", text)]).wishes}

    knobs = "[cpu]\nboost = on\n[sysctl]\nvm.swappiness = 1\n"
    assert keeps(knobs) == {"cpu/*/boost": True, "sysctl/vm.swappiness": False}
    assert keeps(f"[policy]\non_battery = keep\n{knobs}") == {"cpu/*/boost": True, "sysctl/vm.swappiness": True}
    assert keeps(f"{knobs}[policy]\non_battery = apply\n") == {"cpu/*/boost": False, "sysctl/vm.swappiness": False}


def test_the_settings_that_steer_torchtuned_itself() -> None:
    merged = load([
        ("/a", "[jobs]\nconfine = affinity\nslots = 4\nreserved = 0-1\nwhen_full = wait\nlimit_core = 0\n"
               "[env]\nomp_max_gpu = 4\nprofiles = cpu, memory\n[gpu]\nwatch = 1E52:1200\n"
               "[session]\ninhibit = none\npower_profile = keep\n"),
    ])  # fmt: skip
    assert (merged.jobs.confine, merged.jobs.slots, merged.jobs.reserved) == ("affinity", 4, frozenset({0, 1}))
    assert merged.jobs.limits == {
        "nofile": "hard",
        "memlock": "keep",
        "core": "0",
        "oom_score_adj": "keep",
    }
    assert (merged.env.omp_max_gpu, merged.env.profiles) == (4, ("cpu", "memory"))
    assert merged.gpu.watch == (("0x1e52", "0x1200"),)
    assert (merged.session.inhibit, merged.session.power_profile) == ((), "keep")
    rules = merged.rules()
    assert (rules.reserved, rules.slots, rules.when_full, rules.omp_max_gpu) == (frozenset({0, 1}), 4, "wait", 4)


def test_blocks_carry_what_they_match() -> None:
    merged = load([("/a", "[block:data]\nmount = /data\nrotational = on\nread_ahead_kb = >=4096\nscheduler = none\n")])
    assert {(wish.knob, tuple(sorted(wish.match.items()))) for wish in merged.wishes} == {
        ("block/*/read_ahead_kb", (("mount", "/data"), ("rotational", "yes"))),
        ("block/*/scheduler", (("mount", "/data"), ("rotational", "yes"))),
    }


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("vm.swappiness = 1", "1: 'vm.swappiness = 1' stands before any section such as [sysctl]"),
        ("[sysclt]\nvm.swappiness = 1", "1: unknown section [sysclt]; did you mean 'sysctl'?"),
        ("[sysctl", "1: '[sysctl' should end with ]"),
        ("[block]\nscheduler = none", "1: a [block:NAME] section needs a name"),
        ("[block:x]\nscheduler = none", "2: [block:x] says of no device: add device, rotational or mount"),
        ("[cpu]\ngovenor = performance", "2: unknown key 'govenor' in [cpu]; did you mean 'governor'?"),
        ("[cpu]\ngovernor = perfomance", "2: governor: unknown value 'perfomance'; did you mean 'performance'?"),
        ("[cpu]\ngovernor = >=5", "2: governor: this knob holds a word"),
        ("[cpu]\ngovernor", "2: 'governor' is not KEY = VALUE"),
        ("[cpu]\nboost = maybe", "2: boost: 'maybe' is neither yes nor no"),
        ("[cpu]\nmin_perf_pct = 101", "2: min_perf_pct: '101' is not a whole number from 0 to 100"),
        ("[cpu]\nlatency_us = >=20", "2: latency_us: this is a ceiling: write N or <=N"),
        ("[cpu]\nboost = on @job", "2: unknown time @job; did you mean 'jobs'?"),
        ("[cpu]\nboost = on\nboost = off", "3: boost is given twice; it was on line 2 already"),
        ("[sysctl]\nvm.swappiness = 10 # low", "2: a comment needs a line of its own"),
        ("[sysctl]\nvm.swappiness = <=x", "2: vm.swappiness: <= needs a whole number, not 'x'"),
        ("[sysctl]\nvm.swappiness =", "2: vm.swappiness: no value given"),
        ("[sysctl]\nswappiness = 1", "2: unknown key 'swappiness' in [sysctl]"),
        ("[sysctl]\nvm/../../etc/passwd = 1", "2: 'vm/../../etc/passwd' is not the name of a sysctl"),
        ("[sysctl]\nvm.drop_caches = 3", "2: vm.drop_caches is an action, not a value"),
        ("[sysctl]\nkernel.modules_disabled = 1", "2: kernel.modules_disabled cannot be set back before a reboot"),
        (
            "[sysctl]\nvm.dirty_bytes = 99999\nvm.dirty_ratio = 5",
            "3: vm.dirty_ratio and vm.dirty_bytes exclude each other",
        ),
        ("[jobs]\nslots = -1", "2: slots: '-1' is not a whole number"),
        ("[jobs]\nslots = 4 @jobs", "2: slots steers torchtuned itself and takes no @jobs"),
        ("[jobs]\nreserved = 3-1", "2: reserved: not a CPU list: '3-1'"),
        ("[gpu]\nwatch = 10de", "2: watch: '10de' is not VENDOR:CLASS"),
        ("[env]\nprofiles = cpus", "2: profiles: unknown value 'cpus'; did you mean 'cpu'?"),
        ("[policy]\ninclude = training", "2: unknown key 'include' in [policy]"),
    ],
)
def test_a_fault_has_its_line_and_the_right_word(text: str, fault: str) -> None:
    found = faults(text)
    assert any(line.startswith(f"/etc/a.conf:{fault}") for line in found), found


def test_all_faults_come_at_once() -> None:
    assert len(faults("[cpu]\ngovernor = x\nboost = x\n[nothing]\nhere = too\n[jobs]\nslots = x")) == 4


def test_of_an_exclusive_pair_the_later_file_counts() -> None:
    found = wishes("[sysctl]\nvm.dirty_bytes = 99999\n", "[sysctl]\nvm.dirty_ratio = 5\n")
    assert [*found] == ["sysctl/vm.dirty_ratio"]


def test_built_in_changes_nothing() -> None:
    built_in = config.builtin()
    assert (built_in.profile, built_in.profile_source) == ("observe", "built-in")
    assert {str(wish.value) for wish in built_in.wishes} == {"keep"}
    assert len(built_in.wishes) > 10


def test_torchtuned_conf_is_all_comments_and_shows_every_setting_with_its_default() -> None:
    text = CONF.read_text()
    assert load([(str(CONF), text)]).settings == load([]).settings
    bare = re.sub(r"(?m)^#(?=[a-z][A-Za-z0-9_.]* = |\[)", "", text)
    shown = load([(str(CONF), bare)])
    usual = load([])
    assert (shown.jobs, shown.env, shown.gpu, shown.session) == (usual.jobs, usual.env, usual.gpu, usual.session)
    training = load([(str(path), path.read_text()) for path in SHIPPED if path.stem == "training"])
    wanted = {wish.knob: (wish.value, wish.when) for wish in training.wishes}
    assert {w.knob: (w.value, w.when) for w in shown.wishes if w.knob in wanted} == wanted
    keys = {(section, key) for section, specs in SECTIONS.items() for key in specs}
    named = {(setting.section, setting.key) for setting in shown.settings if setting.source != "default"}
    timing = {(section, key) for section in SECTIONS for key in ("when", "on_battery")}
    assert keys - named <= timing


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_value_of_a_profile_is_good_and_has_its_reason(path: Path) -> None:
    text = path.read_text()
    load([(str(path), text)])
    if path.stem == "observe":
        return
    comment = ""
    for line in text.partition("[cpu]")[2].splitlines():
        if line.startswith("#"):
            comment = line
        elif " = " in line and not line.endswith(" = keep") and not line.startswith(("rotational", "power_profile")):
            assert comment, f"{path.name}: {line} has no reason"
        if not line:
            comment = ""


def test_the_default_profile_keeps_huge_pages_and_only_raises_limits() -> None:
    path = next(path for path in SHIPPED if path.stem == "training")
    found = {wish.knob: str(wish.value) for wish in load([(str(path), path.read_text())]).wishes}
    assert found["memory/transparent_hugepage"] == "keep"
    assert found["sysctl/net.core.somaxconn"].startswith(">=")
    assert found["sysctl/vm.max_map_count"].startswith(">=")
    assert found["sysctl/vm.swappiness"].startswith("<=")


LINES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["[cpu]", "[sysctl]", "[block:a]", "[jobs]", "# x", "boost = on", "vm.swappiness = 1", "slots = 2"]
    ),
)


@often(300)
@given(st.lists(LINES, max_size=8))
def test_whatever_a_file_says_it_is_read_or_refused_with_a_line(lines: list[str]) -> None:
    found: list[str] = []
    try:
        load([("/etc/x.conf", "\n".join(lines))])
    except InvalidConfig as error:
        found = str(error).split("\n")
    assert all(re.match(r"/etc/x\.conf:[0-9]+: ", line) for line in found)
