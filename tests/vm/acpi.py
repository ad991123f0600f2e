"""ACPI tables for the emulated machine: what its firmware lacks and real drivers of the kernel want to find."""

from __future__ import annotations

import subprocess
from pathlib import Path

# A mains adapter and a battery. The mains are off while byte 0x7f of the CMOS RAM is 1; reading whether they are on
# notices a change and tells the kernel, as an embedded controller would.
POWER = """
OperationRegion (CMOS, SystemIO, 0x70, 2)
Field (CMOS, ByteAcc, NoLock, Preserve) { INDX, 8, DATA, 8 }
IndexField (INDX, DATA, ByteAcc, NoLock, Preserve) { Offset (0x7f), PULL, 8 }
Scope (\\_SB) {
  Device (ADP1) {
    Name (_HID, "ACPI0003")
    Name (LAST, 0)
    Method (_PSR, 0, Serialized) {
      Local0 = (PULL == One)
      If (Local0 != LAST) { LAST = Local0 Notify (ADP1, 0x80) Notify (BAT0, 0x80) }
      Return (LNot (Local0) & One)
    }
  }
  Device (BAT0) {
    Name (_HID, EisaId ("PNP0C0A"))
    Name (_UID, 1)
    Method (_STA) { Return (0x1f) }
    Method (_BIF) { Return (Package () { 1, 5000, 5000, 1, 12000, 500, 100, 1, 1, "test", "1", "LION", "test" }) }
    Method (_BST) {
      If (PULL == One) { Return (Package () { 1, 100, 4000, 12000 }) }
      Return (Package () { 0, 0, 4000, 12000 })
    }
  }
}
"""


def tables(folder: Path, cpus: int) -> Path:
    """Compile an ACPI table that gives every CPU three P-states, so acpi-cpufreq binds, and the machine POWER."""
    body = ['DefinitionBlock ("", "SSDT", 2, "TESTBD", "TESTBED", 1) {', POWER]
    body += [f"External (\\_SB.CPUS.C{cpu:03X}, ProcessorObj)" for cpu in range(cpus)]
    mhz_mw = [(3000, 100000), (2000, 60000), (1000, 20000)]
    states = ", ".join(f"Package () {{ {mhz}, {mw}, 10, 10, {i}, {i} }}" for i, (mhz, mw) in enumerate(mhz_mw))
    port = "ResourceTemplate () { Register (SystemIO, 8, 0, 0x80) }"
    for cpu in range(cpus):
        body.append(
            f"Scope (\\_SB.CPUS.C{cpu:03X}) {{ Name (_PCT, Package () {{ {port}, {port} }}) "
            f"Name (_PSS, Package () {{ {states} }}) Name (_PPC, 0) }}"
        )
    body.append("}")
    source = folder / "tables.asl"
    source.write_text("\n".join(body))
    subprocess.run(["iasl", "-p", folder / "tables", source], check=True, capture_output=True)
    return folder / "tables.aml"
