"""The configuration: what the files say, merged, checked, and with the place where each value comes from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torchtuned import config_keys as keys
from torchtuned import cpuset
from torchtuned.cpuset import CpuSet
from torchtuned.errors import InvalidConfig
from torchtuned.placement import Rules
from torchtuned.policy import Wish, parse_value

DEFAULT_PROFILE = "training"
BUILT_IN = "observe"


@dataclass(frozen=True, kw_only=True)
class JobsConfig:
    """How jobs are placed. `slots` 0: the machine is not divided in advance. `limits`: RLIMIT name to keep|hard|N."""

    confine: str = "auto"
    slots: int = 0
    reserved: CpuSet = frozenset()
    when_full: str = "share"
    limits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    omp_max_gpu: int = 8
    profiles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """`watch`: further PCI devices that count as GPUs, (vendor, class) as sysfs has them: ("0x1234", "0x0380")."""

    watch: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """What is asked of the desktop while jobs run: logind inhibitors, and power-profiles-daemon's performance."""

    inhibit: tuple[str, ...] = ("sleep", "idle")
    power_profile: str = "performance"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One merged value, where it comes from (FILE:LINE or "default"), and what it took the place of."""

    section: str
    key: str
    value: str
    when: str = ""
    source: str = "default"
    overrides: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    profile: str = BUILT_IN
    profile_source: str = "built-in"
    wishes: tuple[Wish, ...] = ()
    jobs: JobsConfig = JobsConfig()
    env: EnvConfig = EnvConfig()
    gpu: GpuConfig = GpuConfig()
    session: SessionConfig = SessionConfig()
    settings: tuple[Setting, ...] = ()

    def rules(self) -> Rules:
        """What placement has to keep to."""
        return Rules(
            reserved=self.jobs.reserved,
            slots=self.jobs.slots,
            when_full=self.jobs.when_full,
            omp_max_gpu=self.env.omp_max_gpu,
        )


@dataclass(frozen=True)
class _Line:
    section: str
    key: str
    value: str
    when: str
    file: str
    line: int

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


def load(
    files: Sequence[tuple[str, str]], *, profile: str = "", profile_source: str = "", faults: Iterable[str] = ()
) -> Config:
    """Merge files of (path, text), later ones win, into a configuration.

    `profile` says what was chosen outside of the files, `faults` what was wrong with finding them. InvalidConfig names
    these and every fault of every file at once.
    """
    faults = list(faults)
    merged: dict[tuple[str, str], list[_Line]] = {}
    for file, text in files:
        lines = _parse(file, text, faults)
        for line in lines:
            partner = _partner(line)
            if any((other.section, other.key) == ("sysctl", partner) and other.line < line.line for other in lines):
                faults.append(f"{line.source}: {line.key} and {partner} exclude each other; the kernel keeps only one")
            merged.pop(("sysctl", partner), None)
            merged.setdefault((line.section, line.key), []).append(line)
    faults += _incomplete_blocks(merged)
    if faults:
        raise InvalidConfig("\n".join(faults), hint="")
    chosen = {place: lines[-1] for place, lines in merged.items()}
    if not profile:
        choice = chosen.get(("policy", "profile"))
        profile, profile_source = (choice.value, choice.source) if choice else (DEFAULT_PROFILE, "default")
    return Config(
        profile=profile,
        profile_source=profile_source,
        wishes=tuple(_wishes(chosen)),
        jobs=JobsConfig(
            confine=_value(chosen, "jobs", "confine"),
            slots=int(_value(chosen, "jobs", "slots")),
            reserved=cpuset.parse_list(_value(chosen, "jobs", "reserved")),
            when_full=_value(chosen, "jobs", "when_full"),
            limits=MappingProxyType(
                {
                    key.removeprefix("limit_"): _value(chosen, "jobs", key)
                    for key in keys.SECTIONS["jobs"]
                    if key.startswith("limit_")
                }
            ),
        ),
        env=EnvConfig(
            omp_max_gpu=int(_value(chosen, "env", "omp_max_gpu")),
            profiles=tuple(_value(chosen, "env", "profiles").split()),
        ),
        gpu=GpuConfig(
            watch=tuple((f"0x{pair[:4]}", f"0x{pair[5:]}") for pair in _value(chosen, "gpu", "watch").split())
        ),
        session=SessionConfig(
            inhibit=tuple(_value(chosen, "session", "inhibit").split()),
            power_profile=_value(chosen, "session", "power_profile"),
        ),
        settings=tuple(_settings(merged)),
    )


def builtin() -> Config:
    """What is in force when no configuration can be used: profile observe, every known knob reported, none changed."""
    keep = "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = keep" for key, spec in specs.items() if spec.knob)
        for section, specs in keys.SECTIONS.items()
    )
    return load([(BUILT_IN, keep)], profile=BUILT_IN, profile_source="built-in")


def policy_section(file: str, text: str) -> dict[str, tuple[str, str]]:
    """What the [policy] section of one file says, {key: (value, FILE:LINE)}, faults elsewhere in it unheeded.

    For finding the other files: `load` reports the faults.
    """
    return {line.key: (line.value, line.source) for line in _parse(file, text, []) if line.section == "policy"}


def _parse(file: str, text: str, faults: list[str]) -> list[_Line]:
    lines: dict[tuple[str, str], _Line] = {}
    section: str | None = None  # None before the first section, "" in one that is not known
    for number, raw in enumerate(text.split("\n"), start=1):
        stripped = raw.strip()
        if not stripped or stripped[0] in "#;":
            continue
        try:
            if stripped[0] == "[":
                section = ""
                section = _section(stripped)
            elif section != "":
                line = _setting(section, stripped, file, number)
                first = lines.setdefault((line.section, line.key), line)
                if first is not line:
                    raise ValueError(f"{line.key} is given twice; it was on line {first.line} already")
        except ValueError as error:
            faults.append(f"{file}:{number}: {error}")
    return list(lines.values())


def _section(text: str) -> str:
    if not text.endswith("]"):
        raise ValueError(f"{text!r} should end with ]")
    name = text[1:-1].strip()
    known = [*keys.SECTIONS, "block:NAME"]
    if name.partition(":")[0].strip() == "block":
        if not re.fullmatch(r"block:[A-Za-z0-9_.-]+", name):
            raise ValueError(f"a [block:NAME] section needs a name of letters, digits, '_', '.' and '-', not {text}")
    elif name not in keys.SECTIONS:
        raise ValueError(f"unknown section {text}; {keys.way_out(name, known)}")
    return name


def _setting(section: str | None, text: str, file: str, number: int) -> _Line:
    name, equals, value = (part.strip() for part in text.partition("="))
    if section is None:
        raise ValueError(f"{text!r} stands before any section such as [sysctl]")
    if not equals or not name:
        raise ValueError(f"{text!r} is not KEY = VALUE")
    if re.search(r"\s[#;]", value):
        raise ValueError("a comment needs a line of its own; here it would be part of the value")
    name, spec = _key(section, name, file)
    value, when = _split_when(value)
    if when and not spec.knob:
        raise ValueError(f"{name} steers torchtuned itself and takes no @{when}")
    try:
        return _Line(section, name, spec.check(value), when, file, number)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _split_when(value: str) -> tuple[str, str]:
    head, at, when = value.rpartition("@")
    if not at or not (head == "" or head[-1].isspace()):
        return value, ""
    if when not in ("boot", "jobs"):
        raise ValueError(f"unknown time @{when}; {keys.way_out(when, ('boot', 'jobs'))}")
    return head.strip(), when


def _key(section: str, name: str, file: str) -> tuple[str, keys.Key]:
    specs = _specs(section)
    if section == "policy" and "/profiles/" in file:
        specs = {**specs, **keys.PROFILE_ONLY}
    if name in specs:
        return name, specs[name]
    if section == "sysctl" and ("." in name or "/" in name):
        plain = keys.sysctl_name(name)
        return plain, keys.sysctl_key(plain)
    raise ValueError(f"unknown key {name!r} in [{section}]; {keys.way_out(name, specs)}")


def _specs(section: str) -> dict[str, keys.Key]:
    return keys.BLOCK if section.startswith("block:") else keys.SECTIONS[section]


def _spec(line: _Line) -> keys.Key:
    specs = {**_specs(line.section), **keys.PROFILE_ONLY}
    return specs[line.key] if line.key in specs else keys.sysctl_key(line.key)


def _partner(line: _Line) -> str:
    if line.section == "sysctl":
        for pair in keys.EXCLUSIVE:
            if line.key in pair:
                return pair[1 - pair.index(line.key)]
    return ""


def _incomplete_blocks(merged: Mapping[tuple[str, str], Sequence[_Line]]) -> Iterable[str]:
    for name in {section for section, _ in merged if section.startswith("block:")}:
        if not any((name, key) in merged for key in keys.BLOCK_MATCH):
            first = min(
                (lines[0] for (section, _), lines in merged.items() if section == name), key=lambda line: line.line
            )
            yield f"{first.source}: [{name}] says of no device: add device, rotational or mount"


def _timing(chosen: Mapping[tuple[str, str], _Line], section: str, key: str) -> str:
    for place in ((section, key), ("policy", key)):
        if place in chosen:
            return chosen[place].value
    return _specs(section)[key].default if key in _specs(section) else ""


def _wishes(chosen: Mapping[tuple[str, str], _Line]) -> Iterable[Wish]:
    for (section, key), line in chosen.items():
        spec = _spec(line)
        if spec.knob:
            # the device file is held open, so it means "while" something; jobs unless somebody says otherwise
            usual = "jobs" if key == "latency_us" else _timing(chosen, section, "when")
            match = {name: chosen[section, name].value for name in keys.BLOCK_MATCH if (section, name) in chosen}
            yield Wish(
                knob=spec.knob,
                value=parse_value(line.value),
                when=line.when or usual,
                source=line.source,
                keep_on_battery=_timing(chosen, section, "on_battery") == "keep",
                match=MappingProxyType(match if section.startswith("block:") else {}),
            )


def _value(chosen: Mapping[tuple[str, str], _Line], section: str, key: str) -> str:
    line = chosen.get((section, key))
    return line.value if line else keys.SECTIONS[section][key].default


def _settings(merged: Mapping[tuple[str, str], Sequence[_Line]]) -> Iterable[Setting]:
    given = {section: None for section, _ in merged}
    for section in {**dict.fromkeys(keys.SECTIONS), **given}:
        names = {**dict.fromkeys(_specs(section)), **{key: None for place, key in merged if place == section}}
        for name in names:
            lines = merged.get((section, name))
            if lines:
                last = lines[-1]
                yield Setting(
                    section=section,
                    key=name,
                    value=last.value,
                    when=last.when,
                    source=last.source,
                    overrides=tuple((line.value, line.source) for line in reversed(lines[:-1])),
                )
            else:
                yield Setting(section=section, key=name, value=_specs(section)[name].default)
