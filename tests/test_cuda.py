"""CUDA_VISIBLE_DEVICES against what CUDA does (recorded with four GPUs) and against torch's own parser."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtuned import cuda
from torchtuned.topology import Gpu

ADDRESSES = ["0000:01:00.0", "0000:25:00.0", "0000:81:00.0", "0000:c1:00.0"]
UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-11111111-0000-0000-0000-000000000001",
    "GPU-11111111-0000-0000-0000-000000000002",
    "GPU-33333333-0000-0000-0000-000000000003",
]
MIG = "MIG-aaaaaaaa-0000-0000-0000-000000000001"


def gpu(index: int, **changes: object) -> Gpu:
    fields: dict[str, object] = {
        "address": ADDRESSES[index],
        "vendor": "0x10de",
        "device": "0x20b0",
        "uuid": UUIDS[index],
        "name": "NVIDIA A100",
    }
    return Gpu(**(fields | changes))  # type: ignore[arg-type]


ALIKE = [gpu(i) for i in range(4)]
T4_AND_A100 = [gpu(0, device="0x1eb8", name="Tesla T4"), gpu(1)]


def indexes(text: str | None, order: str | None = None, gpus: list[Gpu] = ALIKE) -> list[int] | None:
    found = cuda.meaning(text, order, gpus).gpus
    return None if found is None else [ADDRESSES.index(address) for address in found]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("1,x,2", [1]),
        ("3,9", [3]),
        ("1,1", []),
        (" 2, 3", [2, 3]),
        ("1gpu2,2ampere", [1, 2]),
        ("0," + UUIDS[1], [0]),
        ("GPU-8932f937", [0]),
        ("GPU-33333333," + UUIDS[1], [3, 1]),
        ("GPU-11111111", []),  # two GPUs fit
        ("GPU-8932f937,GPU-11111111,GPU-33333333", [0]),
        ("GPU-8932f937,GPU-8932", []),  # the same GPU twice
        ("GPU-8932f937,GPU-8932f937", []),
        ("GPU-8932f937,1", [0]),
    ],
)
def test_as_cuda_reads_it(text: str | None, wanted: list[int]) -> None:
    assert indexes(text) == wanted


@settings(deadline=None)  # the first one imports torch
@given(st.text(alphabet="0123-+, xGPU", max_size=12))
def test_indexes_as_torch_reads_them(text: str) -> None:
    torch_cuda = pytest.importorskip("torch.cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", text)
        try:
            theirs = torch_cuda._parse_visible_devices()
        except ValueError:  # torch trips over a lone sign
            return
    if text.startswith("GPU-"):
        theirs = torch_cuda._transform_uuid_to_ordinals(theirs, UUIDS)
    wanted = []
    for index in theirs:
        if index >= 4:
            break
        wanted.append(index)
    assert indexes(text) == wanted


def test_what_others_may_see_of_an_entry_is_short_and_spelt_out() -> None:
    """It becomes a warning of the job, which everybody may read, root on a terminal among them."""
    longest = [f"{start}{rest}" for start in ("", "GPU-", "MIG-") for rest in ("x\x1b[2J\u202e", "x" * 60000)]
    for entry in longest:
        found = cuda.meaning(entry, None, ALIKE)
        text = found.note + found.reason
        assert text.isprintable()
        assert 0 < len(text) < 200


def test_a_cut_list_is_said() -> None:
    assert cuda.meaning("1,x,2", None, ALIKE).note == "CUDA stops at 'x'"
    assert cuda.meaning("3,9", None, ALIKE).note == "CUDA stops at 9: there are 4 GPUs"
    assert "twice" in cuda.meaning("1,1", None, ALIKE).note
    assert cuda.meaning("0,-1", None, ALIKE).note == ""  # the documented way to end a list


def test_unlike_gpus_have_no_known_order() -> None:
    """T25: with a T4 and an A100, "0" is the A100 by default and the T4 by PCI order."""
    found = cuda.meaning("0", None, T4_AND_A100)
    assert found.gpus is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.reason
    assert cuda.meaning("0", "FASTEST_FIRST", T4_AND_A100).gpus is None
    assert cuda.meaning(None, None, T4_AND_A100).gpus is None
    assert indexes("0", "PCI_BUS_ID", T4_AND_A100) == [0]
    assert indexes("GPU-11111111", None, T4_AND_A100) == [1]
    assert indexes("", None, T4_AND_A100) == []


def test_mig_by_uuid_names_its_gpu() -> None:
    gpus = [gpu(0), gpu(1, mig=(MIG, "MIG-bbbb"))]
    found = cuda.meaning(f"{MIG},MIG-bbbb", None, gpus)
    assert (found.gpus, found.mig) == ((ADDRESSES[1],), (MIG,))
    assert "one MIG device" in found.note
    assert cuda.meaning("MIG-unknown", None, gpus).gpus is None
    old = cuda.meaning(f"MIG-{UUIDS[1]}/3/0", None, gpus)
    assert old.gpus == (ADDRESSES[1],)
    assert cuda.meaning("MIG-bbbb,MIG-bbbb", None, gpus).gpus == ()


def test_indexes_beside_mig_are_unknown() -> None:
    found = cuda.meaning("0", "PCI_BUS_ID", [gpu(0, mig=(MIG,)), gpu(1)])
    assert found.gpus is None
    assert "MIG" in found.reason


def test_uuids_without_nvml_are_unknown() -> None:
    found = cuda.meaning("GPU-8932f937", None, [gpu(0, uuid=""), gpu(1)])
    assert found.gpus is None
    assert "NVML" in found.reason


def test_pci_order_is_numeric_and_nvidia_goes_first() -> None:
    wide = gpu(0, address="10000:01:00.0")
    high = gpu(1, address="f000:01:00.0")
    amd = gpu(2, address="0000:00:02.0", vendor="0x1002")
    assert cuda.meaning(None, None, [amd, wide, high]).gpus == ("f000:01:00.0", "10000:01:00.0")
    assert cuda.meaning("0", None, [amd]).gpus == ("0000:00:02.0",)
    assert cuda.meaning("0", None, []).gpus == ()
