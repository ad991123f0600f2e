"""`torchtuned lint`: reads training scripts and says what in them keeps a GPU, or a CPU, waiting. Never runs them.

    from torchtuned.lint import main
    status = main(["train.py"])        # 0 nothing found, 1 findings or unreadable files, 2 usage

Only the standard library is used, and only `ast` sees the code.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line `[--hints] [--json] [--rules] FILE|DIR…`, argv without the program's name; its status."""
    from . import command  # the rest is imported only when there is something to read

    return command.main(argv)
