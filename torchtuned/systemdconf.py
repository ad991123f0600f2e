"""Settings of systemd's daemons (logind.conf), read as systemd reads them. Pure, and light: it runs before every job.

Of logind.conf itself the first one found counts, /etc before /usr; of drop-ins the first one of each name, all of them
after it, by name.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `collections.abc` would be imported before every job
if TYPE_CHECKING:
    from collections.abc import Callable

FOLDERS = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd")


def settings(
    file: str, *, read: Callable[[str], str | None], names: Callable[[str], list[str]]
) -> dict[str, tuple[str, str]]:
    """{key: (value, the file that has it)} of a file ("logind.conf") with its drop-ins.

    `read` gives the text of a file, None where there is none; `names` those in a folder.
    """
    found: dict[str, tuple[str, str]] = {}
    drop_ins: dict[str, str] = {}
    for folder in FOLDERS:
        for name in names(f"{folder}/{file}.d"):
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{folder}/{file}.d/{name}")
    texts = ((path, read(path)) for path in (f"{folder}/{file}" for folder in FOLDERS))
    first = next(((path, text) for path, text in texts if text is not None), ("", ""))
    for path, text in (first, *((path, read(path)) for _, path in sorted(drop_ins.items()))):
        for line in (text or "").splitlines():
            key, equals, value = line.partition("=")
            if equals and key.strip()[:1] not in ("#", ";"):
                found[key.strip()] = value.strip(), path
    return found


def is_yes(text: str) -> bool:
    """A truth value as systemd writes them."""
    return text.strip().lower() in ("1", "yes", "y", "true", "t", "on")
