"""Which settings a configuration file may hold, what each accepts, and its default. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchtuned import cpuset
from torchtuned.policy import Kind, parse_value
from torchtuned.wording import nearest
from torchtuned.words import CONFINE, ENV_PROFILES, LIMIT_WORDS

Check = Callable[[str], str]
"""Takes the text of a value, returns it in its plain form; ValueError says what is wrong."""

GOVERNORS = ("performance", "powersave", "ondemand", "conservative", "userspace", "schedutil")
PREFERENCES = ("default", "performance", "balance_performance", "balance_power", "power")
PLATFORM_PROFILES = ("low-power", "cool", "quiet", "balanced", "balanced-performance", "performance", "max-power")
SCHEDULERS = ("none", "mq-deadline", "kyber", "bfq")
HUGEPAGE_MODES = ("always", "madvise", "never")
DEFRAG_MODES = ("always", "defer", "defer+madvise", "madvise", "never")
INHIBITABLE = ("sleep", "idle", "shutdown", "handle-lid-switch")
YES, NO = ("yes", "on", "true", "1"), ("no", "off", "false", "0")

EXCLUSIVE = (
    ("vm.dirty_bytes", "vm.dirty_ratio"),
    ("vm.dirty_background_bytes", "vm.dirty_background_ratio"),
    ("vm.overcommit_kbytes", "vm.overcommit_ratio"),
)
"""Sysctls of which the kernel zeroes one when the other is written."""

ACTIONS = frozenset(
    {"vm.drop_caches", "vm.compact_memory", "vm.stat_refresh", "net.ipv4.route.flush", "net.ipv6.route.flush"}
)
"""Sysctls that do something when written and hold no value that could be given back."""

ONE_WAY = frozenset({"kernel.modules_disabled", "kernel.kexec_load_disabled"})
"""Sysctls that the kernel does not let anybody set back before a reboot."""


@dataclass(frozen=True)
class Key:
    """One setting. `knob` is the knob (or pattern) it stands for; without one it steers torchtuned itself."""

    check: Check
    default: str = ""
    knob: str = ""


def way_out(word: str, words: Iterable[str]) -> str:
    """What to do about a misspelling: "did you mean 'x'?", or all that would have been right."""
    words = list(words)
    near = nearest(word, words)
    return f"did you mean {near!r}?" if near else f"one of: {', '.join(words)}"


def one_of(*words: str) -> Check:
    def check(text: str) -> str:
        if text not in words:
            raise ValueError(f"unknown value {text!r}; {way_out(text, words)}")
        return text

    return check


def yes_no(text: str) -> str:
    if text.lower() in YES:
        return "yes"
    if text.lower() in NO:
        return "no"
    raise ValueError(f"{text!r} is neither yes nor no")


def several(*words: str) -> Check:
    """Words separated by blanks or commas; `none` for an empty list."""
    each = one_of(*words)

    def check(text: str) -> str:
        return "" if text == "none" else " ".join(each(word) for word in text.replace(",", " ").split())

    return check


def number(low: int, high: int) -> Check:
    def check(text: str) -> str:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"{text!r} is not a whole number from {low} to {high}")
        return str(int(text))

    return check


def words_knob(*words: str, other: str = "") -> Check:
    """A value for a knob whose values are words; `other` is a pattern for further ones."""

    def check(text: str) -> str:
        value = parse_value(text)
        if value.kind in (Kind.FLOOR, Kind.CEILING):
            raise ValueError("this knob holds a word; floors and ceilings are for numbers")
        for choice in value.choices:
            if choice not in words and not (other and re.fullmatch(other, choice)):
                raise ValueError(f"unknown value {choice!r}; {way_out(choice, words)}")
        return str(value)

    return check


def number_knob(low: int, high: int) -> Check:
    """A value for a knob whose values are whole numbers."""
    inside = number(low, high)

    def check(text: str) -> str:
        value = parse_value(text)
        for choice in value.choices:
            inside(choice)
        return str(value)

    return check


def ceiling_knob(low: int, high: int) -> Check:
    """A value for a knob that is a limit from above, so that N means <=N."""
    inside = number_knob(low, high)

    def check(text: str) -> str:
        value = parse_value(inside(text))
        if value.kind not in (Kind.EXACT, Kind.CEILING, Kind.KEEP):
            raise ValueError("this is a ceiling: write N or <=N")
        return text if value.kind is Kind.KEEP else f"<={value.text}"

    return check


def switch_knob(text: str) -> str:
    """A value for a knob that is on or off."""
    return text if text == "keep" else "on" if yes_no(text) == "yes" else "off"


def free_text(text: str) -> str:
    return text


def any_knob(text: str) -> str:
    return str(parse_value(text))


def cpu_list(text: str) -> str:
    return "" if text == "none" else cpuset.format_list(cpuset.parse_list(text))


def limit(text: str) -> str:
    return text if text in LIMIT_WORDS else number(0, 2**63 - 1)(text)


def oom_score_adj(text: str) -> str:
    if text != "keep" and not (re.fullmatch(r"-?[0-9]{1,4}", text) and -1000 <= int(text) <= 1000):
        raise ValueError(f"{text!r} is neither keep nor a whole number from -1000 to 1000")
    return text if text == "keep" else str(int(text))


def watch_list(text: str) -> str:
    """PCI devices as VENDOR:CLASS, four hexadecimal digits each."""
    pairs = [] if text == "none" else text.lower().replace(",", " ").split()
    for pair in pairs:
        if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", pair):
            raise ValueError(f"{pair!r} is not VENDOR:CLASS, such as 10de:0302")
    return " ".join(pairs)


def clock_range(text: str) -> str:
    if text != "keep" and not re.fullmatch(r"[0-9]{2,5}(-[0-9]{2,5})?", text):
        raise ValueError(f"{text!r} is neither MHZ, nor MHZ-MHZ, nor keep")
    return text


TIMING = {"when": Key(one_of("boot", "jobs"), "boot"), "on_battery": Key(one_of("apply", "keep"), "apply")}
BLOCK = {
    "device": Key(free_text),
    "rotational": Key(yes_no),
    "mount": Key(free_text),
    "read_ahead_kb": Key(number_knob(0, 2**31), "keep", "block/*/read_ahead_kb"),
    "scheduler": Key(words_knob(*SCHEDULERS), "keep", "block/*/scheduler"),
    **TIMING,
}
BLOCK_MATCH = ("device", "rotational", "mount")
SECTIONS: dict[str, dict[str, Key]] = {
    "policy": {"profile": Key(free_text, "training"), **TIMING},
    "cpu": {
        "platform_profile": Key(words_knob(*PLATFORM_PROFILES), "keep", "cpu/platform_profile"),
        "governor": Key(words_knob(*GOVERNORS), "keep", "cpu/*/governor"),
        "energy_performance_preference": Key(
            words_knob(*PREFERENCES, other=r"[0-9]{1,3}"), "keep", "cpu/*/energy_performance_preference"
        ),
        "boost": Key(switch_knob, "keep", "cpu/*/boost"),
        "min_perf_pct": Key(number_knob(0, 100), "keep", "cpu/min_perf_pct"),
        "latency_us": Key(ceiling_knob(0, 1_000_000), "keep", "latency/cpu_dma_latency"),
        **TIMING,
        "on_battery": Key(one_of("apply", "keep"), "keep"),
    },
    "sysctl": {**TIMING},
    "memory": {
        "transparent_hugepage": Key(words_knob(*HUGEPAGE_MODES), "keep", "memory/transparent_hugepage"),
        "transparent_hugepage_defrag": Key(words_knob(*DEFRAG_MODES), "keep", "memory/transparent_hugepage_defrag"),
        **TIMING,
    },
    "gpu": {
        "persistence_mode": Key(switch_knob, "keep", "gpu/*/persistence_mode"),
        "power_control": Key(words_knob("on", "auto"), "keep", "gpu/*/power_control"),
        "power_limit_w": Key(number_knob(1, 100_000), "keep", "gpu/*/power_limit_w"),
        "clocks_mhz": Key(clock_range, "keep", "gpu/*/clocks_mhz"),
        "compute_mode": Key(words_knob("default", "exclusive_process", "prohibited"), "keep", "gpu/*/compute_mode"),
        "watch": Key(watch_list),
        **TIMING,
    },
    "session": {
        "inhibit": Key(several(*INHIBITABLE), "sleep idle"),
        "power_profile": Key(one_of("performance", "keep"), "performance"),
    },
    "jobs": {
        "confine": Key(one_of("auto", *CONFINE), "auto"),
        "slots": Key(number(0, cpuset.LIMIT), "0"),
        "reserved": Key(cpu_list),
        "when_full": Key(one_of("share", "wait", "refuse"), "share"),
        "limit_nofile": Key(limit, "hard"),
        "limit_memlock": Key(limit, "keep"),
        "limit_core": Key(limit, "keep"),
        "limit_oom_score_adj": Key(oom_score_adj, "keep"),
    },
    "env": {"omp_max_gpu": Key(number(1, cpuset.LIMIT), "8"), "profiles": Key(several(*ENV_PROFILES))},
}
PROFILE_ONLY = {"include": Key(free_text), "description": Key(free_text)}


def sysctl_name(key: str) -> str:
    """The plain name of a sysctl, read as sysctl.d(5) does: the first separator decides.

    Dots, unless a part of the name holds a dot (net/ipv4/conf/eth0.100/rp_filter). ValueError if it is none.
    """
    separator = next((character for character in key if character in "./"), "")
    if separator == ".":
        key = key.translate(str.maketrans("./", "/."))
    parts = key.strip("/").split("/")
    if len(parts) < 2 or not all(re.fullmatch(r"[A-Za-z0-9_.:*?\[\]!@-]+", part) and part.strip(".") for part in parts):
        raise ValueError(f"{key!r} is not the name of a sysctl, such as vm.swappiness")
    return "/".join(parts) if any("." in part for part in parts) else ".".join(parts)


def sysctl_key(key: str) -> Key:
    """The setting for a sysctl, by its plain name. ValueError when policy cannot hold it."""
    if key in ACTIONS:
        raise ValueError(f"{key} is an action, not a value, and could not be given back")
    if key in ONE_WAY:
        raise ValueError(f"{key} cannot be set back before a reboot; put it into /etc/sysctl.d instead")
    return Key(any_knob, "keep", f"sysctl/{key}")
