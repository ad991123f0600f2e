"""Puts a file in place whole: who reads sees the old text or the new one, and a power cut leaves one of them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def way_out(error: OSError, folder: Path) -> str:
    """What to do about a file that cannot be written, "" where nothing general helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space there: df -h {folder}"
    if error.errno == errno.EROFS:
        return f"the file system is mounted read-only: findmnt -T {folder}"
    return "this needs root" if error.errno in (errno.EACCES, errno.EPERM) else ""


def replace_file(path: Path, text: str, *, mode: int, sync: bool) -> None:
    """Give a file a new text, and exactly these permissions whatever the umask is. OSError, with the old text kept.

    `sync`: it is on the disk, name and all, when this returns. The temporary file beside it has a fixed name, so a
    killed writer leaves one file, not many; callers see to it that a path has one writer at a time.
    """
    temporary = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode & 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
            if sync:
                file.flush()
                os.fsync(fd)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
