"""How fast a data set's files can be read here: a few seconds from the disk, and the same again from the page cache.

Cold reading needs the files out of the cache. They are asked to leave it (posix_fadvise DONTNEED) only where they are
the caller's own, so that nobody else's cache is thrown away; that drops clean pages and changes no file.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHUNK = 1 << 20
SECONDS = 3.0
MOST_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What was read: bytes, files, and seconds it took."""

    read: int
    files: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes a second."""
        return self.read / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """`cold` is None where no file may be taken out of the cache, and `because` says why."""

    cold: Rate | None
    warm: Rate
    because: str = ""


def sample(paths: Sequence[str], most: int = 4096) -> list[str]:
    """Files spread over the data, in the order of their names; the same ones each time."""
    if len(paths) <= most:
        return list(paths)
    return sorted(random.Random(0).sample(sorted(paths), most))


def measure(
    paths: Sequence[str], progress: Callable[[float], None] = lambda share: None, *, seconds: float = SECONDS
) -> Reading | None:
    """Read for at most `seconds` cold and as long warm; None where nothing can be read. `progress` hears the share of
    the time that is over.
    """
    chosen = sample(paths)
    own = [path for path in chosen if _owned(path)]
    dropped = [path for path in own if _drop(path)]
    because = "" if dropped else "none of the files is yours, so none is taken out of the cache"
    first = _read(dropped or chosen, seconds, lambda share: progress(share / 2))
    cold = first if dropped else None
    # no further into the last file than before: the rest of it is not in the cache
    warm = _read(dropped or chosen, seconds, lambda share: progress(0.5 + share / 2), most=first.read)
    progress(1.0)
    if not warm.read:
        return None
    return Reading(cold=cold, warm=warm, because=because)


def _owned(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _drop(path: str) -> bool:
    """Ask the kernel to forget a file's clean pages."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read(paths: Sequence[str], seconds: float, progress: Callable[[float], None], *, most: int = MOST_BYTES) -> Rate:
    start = now = time.monotonic()
    read = files = 0
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # /proc/kmsg, say, has no end
        except OSError:
            continue
        files += 1
        try:
            while data := os.read(fd, CHUNK):
                read += len(data)
                now = time.monotonic()
                if now - start > seconds or read >= most:
                    break
        except OSError:
            pass
        finally:
            os.close(fd)
        now = time.monotonic()
        progress(min(1.0, (now - start) / seconds))
        if now - start > seconds or read >= most:
            break
    return Rate(read=read, files=files, seconds=max(now - start, 1e-6))
