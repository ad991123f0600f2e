"""Puts a file in place whole: who reads sees the old text or the new one, and a power cut leaves one of them."""

from __future__ import annotations

import contextlib
import errno
import os

TYPE_CHECKING = False  # `pathlib` would be imported before every job that places itself
if TYPE_CHECKING:
    from pathlib import Path


def way_out(error: OSError, folder: Path) -> str:
    """What to do about a file that cannot be written, "" where nothing general helps."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free some space there: df -h {folder}"
    if error.errno == errno.EROFS:
        return f"the file system is mounted read-only: findmnt -T {folder}"
    return "this needs root" if error.errno in (errno.EACCES, errno.EPERM) else ""


def replace_file(path: Path | str, text: str, *, mode: int, sync: bool, folder: int | None = None) -> None:
    """Give a file a new text, and exactly these permissions whatever the umask is. OSError, with the old text kept.

    `sync`: it is on the disk, name and all, when this returns. `folder` is the descriptor of the folder that a
    relative path is in. The temporary file beside it has a fixed name, so a killed writer leaves one file, not many;
    callers see to it that a path has one writer at a time.
    """
    temporary = os.path.splitext(path)[0] + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode & 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
            if sync:
                file.flush()
                os.fsync(fd)
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    if sync:
        parent = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
