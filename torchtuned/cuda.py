"""Which physical GPUs a job means by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. Pure.

CUDA's own reading has rules that cost people their placement: it stops at the first entry that it cannot use,
"1gpu" counts as 1, naming a GPU twice leaves none at all, and without CUDA_DEVICE_ORDER=PCI_BUS_ID the indexes go
from the fastest GPU to the slowest, an order that no file tells. So the answer here is a list of PCI addresses, or
that it is not known and why; binding to a guess would be worse than binding to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchtuned.topology import NVIDIA, Gpu, pci_key

PCI_ORDER = "PCI_BUS_ID"
LONGEST = 64  # of an entry that a message shows; a MIG device's has up to 60
# A GPU held by one of these is somebody else's, a virtual machine's
AWAY = frozenset({"vfio-pci", "pci-stub", "xen-pciback", "pciback"})


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the variables name. `gpus` are PCI addresses in CUDA's order, or None when that cannot be known.

    `reason` says why it is not known. `note` is for the user where CUDA takes less than was written.
    `mig` are the MIG devices named: CUDA then sees only those slices of `gpus`.
    """

    gpus: tuple[str, ...] | None
    reason: str = ""
    note: str = ""
    mig: tuple[str, ...] = ()


def meaning(visible: str | None, order: str | None, gpus: Sequence[Gpu]) -> Meaning:
    """Read the two variables (None: not set) for a machine with these GPUs."""
    here = counted(gpus)
    if visible is not None and visible.startswith("GPU-"):
        return _by_uuid(_prefixed(visible, "GPU-"), here)
    if visible is not None and visible.startswith("MIG-"):
        return _by_mig(_prefixed(visible, "MIG-"), here)
    indexes, note = (list(range(len(here))), "") if visible is None else _indexes(visible)
    beyond = next((i for i, index in enumerate(indexes) if index >= len(here)), None)
    if beyond is not None:
        note = f"CUDA stops at {indexes[beyond]}: there are {len(here)} GPUs"
        indexes = indexes[:beyond]
    if not indexes:
        return Meaning(gpus=(), note=note)
    if any(gpu.mig for gpu in here):
        return Meaning(
            gpus=None,
            note=note,
            reason="a GPU is divided by MIG, and then indexes name no certain device; name UUIDs (nvidia-smi -L)",
        )
    if order != PCI_ORDER and not alike(here):
        return Meaning(
            gpus=None,
            note=note,
            reason="the GPUs are of different kinds and CUDA counts them fastest first;"
            " set CUDA_DEVICE_ORDER=PCI_BUS_ID or name UUIDs",
        )
    return Meaning(gpus=tuple(here[index].address for index in indexes), note=note)


def counted(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that an index counts, in PCI order: NVIDIA's, or where there are none, all (ROCm's torch reads the
    variables too). One that is lent to a virtual machine is none of them.
    """
    here = [gpu for gpu in gpus if gpu.driver not in AWAY]
    return sorted([gpu for gpu in here if gpu.vendor == NVIDIA] or here, key=lambda gpu: pci_key(gpu.address))


def names(gpus: Sequence[Gpu], granted: Sequence[str]) -> dict[str, object]:
    """How CUDA calls the GPUs of a job, for the grant document: by index, but not where MIG divides one or one is not
    counted; by UUID where NVML told. `gpus` are the machine's, `granted` addresses.
    """
    here = counted(gpus)
    places = {gpu.address: index for index, gpu in enumerate(here)}
    mine = [gpu for address in granted for gpu in gpus if gpu.address == address]
    there = len(mine) == len(granted)
    by_index = there and all(gpu.address in places and not gpu.mig for gpu in mine)
    by_uuid = there and all(gpu.uuid or gpu.mig for gpu in mine)
    return {
        "gpus_alike": alike(here),
        "gpu_indexes": [places[gpu.address] for gpu in mine] if by_index else None,
        "gpu_uuids": [uuid for gpu in mine for uuid in gpu.mig or (gpu.uuid,)] if by_uuid else None,
    }


def alike(gpus: Sequence[Gpu]) -> bool:
    """True when no GPU can be faster than another as far as is known: then CUDA's order is PCI order."""
    return len({(gpu.vendor, gpu.device, gpu.name) for gpu in gpus}) <= 1


def _strtoul(text: str) -> int:
    """The number `text` starts with, or a negative one when it starts with none: CUDA takes "1gpu2" for 1."""
    sign = text[:1] if text[:1] in ("+", "-") else ""
    digits = text[len(sign) :]
    length = next((i for i, char in enumerate(digits) if char not in "0123456789"), len(digits))
    return int(sign + digits[:length]) if 0 < length <= 9 else -1


def _indexes(visible: str) -> tuple[list[int], str]:
    found: list[int] = []
    for entry in visible.split(","):
        index = _strtoul(entry.strip())
        if index in found:
            return [], f"{index} is named twice, and CUDA then sees no GPU"
        if index < 0:
            rest = entry.strip()
            return found, f"CUDA stops at {_shown(rest)}" if rest not in ("", "-1") else ""
        found.append(index)
    return found, ""


def _shown(entry: str) -> str:
    """An entry in quotes, as all may see it: what is odd in it spelt out, and no more of it than of a UUID."""
    return repr(entry if len(entry) <= LONGEST else f"{entry[: LONGEST - 3]}...")


def _prefixed(visible: str, prefix: str) -> list[str]:
    """The leading entries that start with `prefix`; [] when one is there twice."""
    entries: list[str] = []
    for entry in visible.split(","):
        if entry in entries:
            return []
        if not entry.startswith(prefix):
            break
        entries.append(entry)
    return entries


def _by_uuid(entries: Sequence[str], gpus: Sequence[Gpu]) -> Meaning:
    if not entries:
        return Meaning(gpus=(), note="a UUID is named twice, and CUDA then sees no GPU")
    if not gpus:
        return Meaning(gpus=())
    if not all(gpu.uuid for gpu in gpus):
        return Meaning(gpus=None, reason="the UUIDs of the GPUs here are not known (NVML did not tell them)")
    chosen: list[str] = []
    for entry in entries:
        fits = [gpu.address for gpu in gpus if gpu.uuid.startswith(entry)]
        if len(fits) != 1:
            fault = "no GPU has this UUID" if not fits else f"{len(fits)} GPUs fit"
            return Meaning(gpus=tuple(chosen), note=f"CUDA stops at {_shown(entry)}: {fault}")
        if fits[0] in chosen:
            return Meaning(gpus=(), note=f"{_shown(entry)} is a GPU named before, and CUDA then sees no GPU")
        chosen.append(fits[0])
    return Meaning(gpus=tuple(chosen))


def _by_mig(entries: Sequence[str], gpus: Sequence[Gpu]) -> Meaning:
    """One MIG device: CUDA enumerates no more than one in a process, however many are named."""
    if not entries:
        return Meaning(gpus=(), note="a MIG device is named twice, and CUDA then sees no GPU")
    entry = entries[0]
    note = "CUDA uses one MIG device per process, the first" if len(entries) > 1 else ""
    if entry.startswith("MIG-GPU-"):  # drivers before 470: MIG-GPU-UUID/gpu instance/compute instance
        uuid = entry.removeprefix("MIG-").partition("/")[0]
        fits = [gpu.address for gpu in gpus if gpu.uuid == uuid]
    else:
        fits = [gpu.address for gpu in gpus if entry in gpu.mig]
    if len(fits) != 1:
        return Meaning(gpus=None, mig=(entry,), note=note, reason=f"no GPU here is known to have {_shown(entry)}")
    return Meaning(gpus=(fits[0],), mig=(entry,), note=note)
