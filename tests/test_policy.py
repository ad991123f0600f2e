from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtuned.policy import Entry, Kind, Outcome, Owner, Situation, State, Value, Wish, decide, judge, parse_value

ALWAYS = Situation()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", Value(Kind.EXACT, ("10",))),
        (">=4096", Value(Kind.FLOOR, ("4096",))),
        ("<= 10", Value(Kind.CEILING, ("10",))),
        (">=4096 131072  6291456", Value(Kind.FLOOR, ("4096 131072 6291456",))),
        ("performance | schedutil", Value(Kind.PREFER, ("performance", "schedutil"))),
        ("keep", Value(Kind.KEEP)),
        ("4096\t87380 1", Value(Kind.EXACT, ("4096 87380 1",))),
    ],
)
def test_values_are_read(text: str, value: Value) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no value given"),
        (">=", ">= needs a whole number, not ''"),
        ("<=ten", "<= needs a whole number, not 'ten'"),
        ("<10", "cannot read '<10'"),
        ("=10", "cannot read '=10'"),
        ("a||b", "empty choice"),
        ("performance|keep", "'keep' stands alone"),
    ],
)
def test_values_that_make_no_sense_say_why(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault.replace("|", r"\|")):
        parse_value(text)


@given(st.sampled_from(["10", ">=4096", "<=10", "a|b", "keep", ">=1 2 3", "1 2"]))
def test_a_value_prints_as_it_is_written(text: str) -> None:
    assert parse_value(str(parse_value(text))) == parse_value(text)


@pytest.mark.parametrize(
    ("wanted", "current", "targets", "reason"),
    [
        ("10", "60", ("10",), ""),
        ("10", "10", (), "already so"),
        (">=4096", "128", ("4096",), ""),
        (">=4096", "4096", (), "already so"),
        (">=4096", "1048576", (), "already higher"),
        ("<=10", "60", ("10",), ""),
        ("<=10", "1", (), "already lower"),
        (">=4096 131072 6291456", "8192 65536 6291456", ("8192 131072 6291456",), ""),
        ("keep", "60", (), "keep"),
    ],
)
def test_numbers_are_compared(wanted: str, current: str, targets: tuple[str, ...], reason: str) -> None:
    decision = decide(parse_value(wanted), current)
    assert (decision.targets, decision.reason) == (targets, reason)
    assert decision.outcome is Outcome.KEPT


def test_what_cannot_be_compared_is_left_alone() -> None:
    for current in ("unlimited", "1 2"):
        decision = decide(parse_value(">=5"), current)
        assert (decision.targets, decision.outcome) == ((), Outcome.FAILED)
        assert f"cannot compare {current!r} with '5'" in decision.reason


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_capacity_never_goes_down(asked: int, current: int) -> None:
    decision = decide(parse_value(str(asked)), str(current), capacity=True)
    assert decision.targets == ((str(asked),) if asked > current else ())


def test_preferences_skip_what_is_not_offered() -> None:
    wanted = parse_value("performance|schedutil")
    assert decide(wanted, "ondemand", ["ondemand", "schedutil"]).targets == ("schedutil",)
    assert decide(wanted, "ondemand", ["ondemand", "schedutil"]).reason == "performance is not offered here"
    assert decide(wanted, "schedutil", ["performance", "schedutil"]).targets == ("performance", "schedutil")
    assert decide(wanted, "schedutil", ["ondemand", "schedutil"]).targets == ()
    none = decide(wanted, "powersave", ["powersave"])
    assert (none.targets, none.outcome) == ((), Outcome.UNSUPPORTED)
    assert none.reason == "not offered here; the kernel offers powersave"


def wish(value: str = "10", *, when: str = "boot", battery: bool = False) -> Wish:
    return Wish(knob="sysctl/vm.swappiness", value=parse_value(value), when=when, source="a:1", keep_on_battery=battery)


def entry(state: State = State.WRITTEN, *, previous: str | None = None) -> Entry:
    return Entry(knob="sysctl/vm.swappiness", original="60", written="10", asked="10", state=state, previous=previous)


@pytest.mark.parametrize(
    ("current", "state", "outcome", "targets", "ours"),
    [
        ("10", State.WRITTEN, Outcome.APPLIED, (), True),
        ("10", State.PENDING, Outcome.APPLIED, (), True),  # killed before it was confirmed
        ("60", State.PENDING, Outcome.APPLIED, ("10",), False),  # killed before it was written
        ("60", State.UNDOING, Outcome.APPLIED, ("10",), False),  # killed after it was given back
        ("10", State.UNDOING, Outcome.APPLIED, (), True),  # killed before it was given back
        ("60", State.WRITTEN, Outcome.DRIFTED, (), False),  # somebody set it back
        ("1", State.WRITTEN, Outcome.DRIFTED, (), False),
        ("1", State.PENDING, Outcome.DRIFTED, (), False),
        ("1", State.DRIFTED, Outcome.DRIFTED, (), False),
        ("10", State.DRIFTED, Outcome.APPLIED, (), True),  # somebody put ours back
    ],
)
def test_an_entry_tells_whose_a_value_is(
    current: str, state: State, outcome: Outcome, targets: tuple[str, ...], *, ours: bool
) -> None:
    verdict = judge(wish(), current, entry(state), ALWAYS)
    assert (verdict.outcome, verdict.targets, verdict.ours) == (outcome, targets, ours)
    assert verdict.release == bool(targets), "the way back is gone to its end before anything is set anew"


def test_an_earlier_value_of_ours_is_ours() -> None:
    verdict = judge(wish(), "20", entry(State.PENDING, previous="20"), ALWAYS)
    assert (verdict.outcome, verdict.targets) == (Outcome.APPLIED, ("10",))


def test_reassert_writes_again_what_the_kernel_lost_but_nothing_that_somebody_changed() -> None:
    again = Situation(reassert=True)
    assert judge(wish(), "60", entry(), again).targets == ("10",)
    assert judge(wish(), "1", entry(State.DRIFTED), again).targets == ()


@pytest.mark.parametrize(
    ("text", "situation", "reason"),
    [
        ("keep", ALWAYS, "keep"),
        (">=30", ALWAYS, "already higher"),
        ("10", Situation(on_battery=True), "left alone while on battery"),
        ("10", Situation(jobs_active=False), "10 while a job runs"),
    ],
)
def test_what_is_wanted_no_longer_is_given_back(text: str, situation: Situation, reason: str) -> None:
    asked = wish(text, when="jobs" if "job" in reason else "boot", battery=True)
    verdict = judge(asked, "10", entry(), situation)
    assert (verdict.outcome, verdict.reason) == (Outcome.KEPT, reason)
    assert verdict.release
    assert not verdict.targets


def test_owners_come_first() -> None:
    tuner = Situation(owner=Owner("TuneD", "tuned.service", active=True))
    verdict = judge(wish(), "10", entry(), tuner)
    assert (verdict.outcome, verdict.source, verdict.hand_over, verdict.release) == (
        Outcome.FOREIGN, "tuned.service", True, False,
    )  # fmt: skip
    admin = Situation(owner=Owner("the administrator", "/etc/sysctl.d/x.conf:3"))
    verdict = judge(wish(), "60", None, admin)
    assert (verdict.outcome, verdict.source, verdict.targets) == (Outcome.FOREIGN, "/etc/sysctl.d/x.conf:3", ())
    assert judge(wish("keep"), "60", None, admin).outcome is Outcome.KEPT


def test_implied_values_are_kept() -> None:
    verdict = judge(wish(), "60", None, ALWAYS, implied="implied by governor performance")
    assert (verdict.outcome, verdict.targets, verdict.reason) == (Outcome.KEPT, (), "implied by governor performance")
