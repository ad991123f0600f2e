from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes.tree import make_tree

from torchtuned.configfiles import profiles, read_config
from torchtuned.errors import InvalidConfig
from torchtuned.host import Host

TOP = Path(__file__).resolve().parent.parent
SHARE = "usr/share/torchtuned/profiles"
BASE = {
    f"{SHARE}/training.conf": "[policy]\ndescription = the usual\n[sysctl]\nvm.swappiness = <=10\n",
    f"{SHARE}/quiet.conf": "[policy]\ninclude = training\nwhen = jobs\n",
}


def machine(tmp_path: Path, files: Mapping[str, str]) -> Host:
    return Host(make_tree(tmp_path, {**BASE, **files}))


def wanted(host: Host, profile: str | None = None) -> dict[str, tuple[str, str, str]]:
    return {wish.knob: (str(wish.value), wish.when, wish.source) for wish in read_config(host, profile).wishes}


def test_without_any_file_the_default_profile_counts(tmp_path: Path) -> None:
    config = read_config(machine(tmp_path, {}))
    assert (config.profile, config.profile_source) == ("training", "default")
    assert [wish.source for wish in config.wishes] == [f"/{SHARE}/training.conf:4"]


def test_who_chooses_the_profile(tmp_path: Path) -> None:
    host = machine(tmp_path, {"etc/torchtuned/torchtuned.conf": "\n[policy]\nprofile = quiet\n"})
    config = read_config(host)
    assert (config.profile, config.profile_source) == ("quiet", "/etc/torchtuned/torchtuned.conf:3")
    make_tree(tmp_path, {"etc/torchtuned/conf.d/a.conf": "[policy]\nprofile = training\n"})
    assert read_config(host).profile_source == "/etc/torchtuned/conf.d/a.conf:2"
    make_tree(tmp_path, {"var/lib/torchtuned/profile": "quiet\n"})
    config = read_config(host)
    assert (config.profile, config.profile_source) == ("quiet", "SetProfile, kept in /var/lib/torchtuned/profile")
    assert (read_config(host, "training").profile, read_config(host, "training").profile_source) == (
        "training",
        "asked for",
    )
    make_tree(tmp_path, {"var/lib/torchtuned/profile": "gone\n"})
    assert read_config(host, "").profile == "training"  # the files' own
    make_tree(tmp_path, {"var/lib/torchtuned/profile": "\n"})
    assert read_config(host).profile == "training"


def test_a_profile_comes_after_what_it_includes_and_before_the_configuration(tmp_path: Path) -> None:
    host = machine(tmp_path, {})
    assert wanted(host, "quiet") == {"sysctl/vm.swappiness": ("<=10", "jobs", f"/{SHARE}/training.conf:4")}
    make_tree(tmp_path, {"etc/torchtuned/torchtuned.conf": "[sysctl]\nvm.swappiness = 30 @boot\n"})
    assert wanted(host, "quiet") == {"sysctl/vm.swappiness": ("30", "boot", "/etc/torchtuned/torchtuned.conf:2")}


def test_drop_ins_go_by_name_whatever_their_folder(tmp_path: Path) -> None:
    def drop_in(folder: str, name: str, value: int) -> dict[str, str]:
        return {f"{folder}/torchtuned/conf.d/{name}": f"[sysctl]\nvm.swappiness = {value}\n"}

    host = machine(tmp_path, drop_in("etc", "10-a.conf", 1) | drop_in("usr/lib", "20-b.conf", 2))
    assert wanted(host)["sysctl/vm.swappiness"][0] == "2"
    make_tree(tmp_path, drop_in("run", "20-b.conf", 3))
    assert wanted(host)["sysctl/vm.swappiness"] == ("3", "boot", "/run/torchtuned/conf.d/20-b.conf:2")
    make_tree(tmp_path, {"etc/torchtuned/conf.d/20-b.conf": "-> /dev/null"})
    assert wanted(host)["sysctl/vm.swappiness"][0] == "1"
    make_tree(tmp_path, {"etc/torchtuned/conf.d/README": "not = read\n"})
    assert wanted(host)["sysctl/vm.swappiness"][0] == "1"


def test_the_administrators_profiles_come_first(tmp_path: Path) -> None:
    mine = {"etc/torchtuned/profiles/mine.conf": "[policy]\ndescription = of my own\ninclude = training\n"}
    host = machine(tmp_path, {**mine, "etc/torchtuned/profiles/quiet.conf": "[policy]\nwhen = jobs\n"})
    assert [(known.name, known.description, known.file) for known in profiles(host)] == [
        ("mine", "of my own", "/etc/torchtuned/profiles/mine.conf"),
        ("quiet", "", "/etc/torchtuned/profiles/quiet.conf"),
        ("training", "the usual", f"/{SHARE}/training.conf"),
    ]
    assert [*wanted(host, "mine")] == ["sysctl/vm.swappiness"]
    assert wanted(host, "quiet") == {}


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    host = machine(tmp_path, {"etc/torchtuned/torchtuned.conf": "[policy]\nprofile = trainin\n"})
    with pytest.raises(InvalidConfig, match=r"torchtuned.conf:2: unknown profile 'trainin'; did you mean 'training'\?"):
        read_config(host)
    with pytest.raises(InvalidConfig, match=r"asked for: unknown profile '\.\./x'"):
        read_config(host, "../x")
    with pytest.raises(InvalidConfig, match=r"no profile 'training', nor any other in /etc/.* or /usr/.*: install"):
        read_config(Host(tmp_path / "var"), "training")


def test_profiles_that_include_each_other(tmp_path: Path) -> None:
    loop = {f"{SHARE}/a.conf": "[policy]\ninclude = b\n", f"{SHARE}/b.conf": "[policy]\ninclude = training a\n"}
    with pytest.raises(InvalidConfig, match=r"b.conf:2: profile 'a' includes itself through a and b"):
        read_config(machine(tmp_path, loop), "a")


def test_faults_of_all_files_come_at_once(tmp_path: Path) -> None:
    files = {"etc/torchtuned/torchtuned.conf": "[cpu]\nx = 1\n", "etc/torchtuned/conf.d/a.conf": "[jobs]\nslots = x\n"}
    with pytest.raises(InvalidConfig) as caught:
        read_config(machine(tmp_path, files))
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        "/etc/torchtuned/torchtuned.conf:2", "/etc/torchtuned/conf.d/a.conf:2",
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["file", "folder", "owner", "profile"])
def test_what_others_can_write_is_refused(tmp_path: Path, what: str) -> None:
    host = machine(tmp_path, {"etc/torchtuned/torchtuned.conf": "[sysctl]\nvm.swappiness = 1\n"})
    path = tmp_path / "etc/torchtuned/torchtuned.conf"
    match what:
        case "file":
            path.chmod(0o664)
        case "folder":
            path.parent.chmod(0o777)
        case "owner":
            os.chown(path, 12345, 0)
        case "profile":
            (tmp_path / SHARE / "training.conf").chmod(0o646)
    with pytest.raises(
        InvalidConfig, match=r"not used: others than root can change it \(mode 0[0-7]{3}, owner [0-9]+\)"
    ):
        read_config(host)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    host = machine(tmp_path, {"etc/torchtuned/conf.d/a.conf/x": ""})
    with pytest.raises(InvalidConfig, match=r"/etc/torchtuned/conf.d/a.conf: a folder, not a file"):
        read_config(host)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"torchtuned.conf": "-> moved.conf"}, "torchtuned.conf: a link that leads nowhere: no such file"),
        ({"torchtuned.conf": "-> torchtuned.conf"}, "torchtuned.conf: a link that leads nowhere: too many levels"),
        ({"conf.d": "plain"}, "conf.d: not a folder"),
        ({"conf.d": "-> conf.d"}, "conf.d: a link that leads nowhere"),
        ({"conf.d/a.conf": "-> gone"}, "conf.d/a.conf: a link that leads nowhere"),
        ({"profiles": "plain"}, "profiles: not a folder"),
        ({"torchtuned.conf/x": ""}, "torchtuned.conf: a folder, not a file"),
        ({"../torchtuned": "plain"}, "torchtuned.conf: not a directory"),
        ({"../torchtuned": "-> gone"}, "torchtuned: a link that leads nowhere"),
        ({"../../var/lib/torchtuned/profile": "-> gone"}, "profile: a link that leads nowhere"),
        ({"torchtuned.conf": "\ufeff[sysctl]\n"}, r"conf:1: begins with a byte order mark \(UTF-8\); save it as UTF-8"),
        ({"torchtuned.conf": "[sysctl]\n".encode("utf-16")}, r"byte order mark \(UTF-16\)"),
    ],
)
def test_a_mistake_with_a_file_is_no_wish_for_no_configuration(
    tmp_path: Path, files: Mapping[str, str | bytes], fault: str
) -> None:
    host = machine(tmp_path, {"etc/x": ""})
    make_tree(tmp_path / "etc/torchtuned" if ".." not in str(files) else tmp_path / "etc", {
        name.removeprefix("../"): content for name, content in files.items()
    })  # fmt: skip
    with pytest.raises(InvalidConfig, match=fault) as caught:
        read_config(host)
    assert "chmod" not in str(caught.value)


@pytest.mark.parametrize("name", ["torchtuned.conf", "conf.d/a.conf", "profiles/training.conf"])
def test_a_pipe_is_told_and_not_waited_for(tmp_path: Path, name: str) -> None:
    host = machine(tmp_path, {f"etc/torchtuned/{folder}/x": "" for folder in ("conf.d", "profiles")})
    os.mkfifo(tmp_path / "etc/torchtuned" / name)
    with pytest.raises(InvalidConfig, match=f"{name}: a pipe, not a file"):
        read_config(host)


def test_dev_null_masks_and_nobody_is_told_to_chmod_it(tmp_path: Path) -> None:
    host = machine(tmp_path, {"etc/torchtuned/torchtuned.conf": "-> /dev/null"})
    assert wanted(host)["sysctl/vm.swappiness"][0] == "<=10"
    make_tree(tmp_path, {"etc/torchtuned/profiles/training.conf": "-> /dev/null"})
    with pytest.raises(InvalidConfig, match="default: unknown profile 'training'"):
        read_config(host)
    assert [known.name for known in profiles(host)] == ["quiet"]


def test_faults_of_profiles_come_with_all_others(tmp_path: Path) -> None:
    files = {
        f"{SHARE}/quiet.conf": "[policy]\ninclude = zz ../../x\n[cpu]\nx = 1\n",
        "etc/torchtuned/torchtuned.conf": "[policy]\nprofile = quiet\n[jobs]\nslots = x\n",
        "etc/torchtuned/conf.d/a.conf": "-> gone",
    }
    with pytest.raises(InvalidConfig) as caught:
        read_config(machine(tmp_path, files))
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for number, words in enumerate(("a.conf: a link", "'zz'", "'../../x'", "quiet.conf:4: ", "torchtuned.conf:4: ")):
        assert words in lines[number]


@pytest.mark.parametrize("name", ["training", "throughput", "latency", "quiet", "observe"])
def test_the_profiles_that_are_shipped(tmp_path: Path, name: str) -> None:
    shipped = {f"{SHARE}/{path.name}": path.read_text() for path in (TOP / "share/torchtuned/profiles").glob("*.conf")}
    assert len(shipped) == 5
    conf = {"etc/torchtuned/torchtuned.conf": (TOP / "etc/torchtuned/torchtuned.conf").read_text()}
    host = Host(make_tree(tmp_path, shipped | conf))
    found = read_config(host, name)
    wishes = {wish.knob: wish for wish in found.wishes}
    assert next(known for known in profiles(host) if known.name == name).description
    match name:
        case "observe":
            assert {str(wish.value) for wish in found.wishes} == {"keep"}
            assert (found.session.inhibit, found.session.power_profile) == ((), "keep")
        case "quiet":
            active = [wish for wish in found.wishes if str(wish.value) != "keep"]
            assert {wish.when for wish in active} == {"jobs"}
            assert all(wish.keep_on_battery for wish in active)
        case "latency":
            assert (str(wishes["latency/cpu_dma_latency"].value), wishes["latency/cpu_dma_latency"].when) == (
                "<=20",
                "jobs",
            )
        case "throughput":
            assert wishes["block/*/read_ahead_kb"].match == {"rotational": "yes"}
    if name != "observe":
        assert str(wishes["cpu/*/governor"].value) == "performance|schedutil"
        assert found.session.inhibit == ("sleep", "idle")
