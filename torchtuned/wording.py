"""Words that several commands and checks share. Pure, and light: torchtuned-run imports it before every job."""

from __future__ import annotations

TYPE_CHECKING = False  # `collections.abc` would be imported before every job
if TYPE_CHECKING:
    from collections.abc import Iterable


LIKE = 0.7  # from 0 to 1; with less, --bogus is like --gpus


def nearest(word: str, words: Iterable[str]) -> str:
    """That of some words which a misspelling may have meant, "" when none is like it."""
    import difflib  # only where something is misspelt

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=LIKE)), "")


def count(number: object, word: str) -> str:
    """ "1 job", "2 jobs"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def size(number: float) -> str:
    """Bytes for people: "64 MiB", "12.3 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.3g} TiB" if number < 1000 else f"{number:.0f} TiB"


def named(word: str) -> str:
    """What somebody typed, so that nothing can be seen, too."""
    return word or "''"
