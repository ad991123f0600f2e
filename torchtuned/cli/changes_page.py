"""The page "What torchtuned changes on your machine, and how to undo it", made from the profiles themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchtuned.configfiles import profiles, read_config
from torchtuned.effects import effect
from torchtuned.host import Host
from torchtuned.policy import Kind, Wish

HEAD = """\
# What torchtuned changes on your machine, and how to undo it

This page is made from the profiles by `torchtuned profile show --markdown`; it says what they ask for. What they would
do on *your* machine, with your own configuration, `torchtuned plan` says, and changes nothing.

Rules that hold for every line below:

- What a value was is written down, in `/run/torchtuned/ledger.json`, before it is changed.
- `>=N` only ever raises a limit, `<=N` only ever lowers a value; where the machine is already there, nothing is done.
- What an administrator has set in `/etc/sysctl.d`, or another tuner that is running takes care of, is left alone.
- `keep` means left as it is. A setting that the machine does not have is skipped.
- Where the page says *unmeasured*, nobody has published what it does for training.

## Undo

| to give back | command |
|---|---|
| one value | `sudo torchtuned undo sysctl/vm.swappiness` |
| all, until the next boot or `torchtuned apply` | `sudo torchtuned undo` |
| all, and stay away | `sudo systemctl disable --now torchtuned` |
| all, and remove the program | `sudo apt remove torchtuned` |
| change nothing, only report | `sudo torchtuned profile set observe` |

A value that somebody has changed after torchtuned is never overwritten by undo; it is reported.
"""


def page(host: Host, names: Sequence[str]) -> str:
    """The page for these profiles, as Markdown. InvalidConfig for a profile that cannot be read."""
    descriptions = {profile.name: profile.description for profile in profiles(host)}
    lines = [HEAD]
    for name in names:
        wishes = read_config(host, name).wishes
        changing = [wish for wish in wishes if wish.value.kind is not Kind.KEEP]
        kept = [wish for wish in wishes if wish.value.kind is Kind.KEEP]
        lines.append(f"## Profile {name}: {descriptions.get(name, '')}\n")
        if changing:
            lines += _table(changing)
        else:
            lines.append("Changes nothing.\n")
        if kept:
            lines.append("Left as it is: " + ", ".join(f"`{wish.knob}`" for wish in kept) + ".\n")
    return "\n".join(lines)


def _table(wishes: Iterable[Wish]) -> Iterator[str]:
    yield "| setting | becomes | when | what it is | published effect on training |"
    yield "|---|---|---|---|---|"
    for wish in wishes:
        known = effect(wish.knob)
        when = "while jobs run" if wish.when == "jobs" else "always"
        if wish.keep_on_battery:
            when += ", not on battery"
        source = f" ({known.source})" if known.source else ""
        value = str(wish.value).replace("|", ", else ")
        yield f"| `{wish.knob}` | `{value}` | {when} | {known.purpose} | {known.effect}{source} |"
    yield ""
