"""Other versions of the built package, for tests of upgrades."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path


def with_version(deb: Path, version: str, out: Path) -> Path:
    """Write the same package under another version to out, and return out."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["dpkg-deb", "--raw-extract", deb, scratch], check=True)
        control = Path(scratch, "DEBIAN/control")
        control.write_text(re.sub(r"^Version: .*$", f"Version: {version}", control.read_text(), flags=re.M))
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", scratch, out], check=True, capture_output=True)
    return out
