"""loader_args: what it chooses, what it leaves, and that DataLoader takes it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchtuned.torch import Place, loader_args
from torchtuned.torch.loader import MAX_WORKERS, default_workers


def place(cores: int, *, gpu: bool = False, ranks: int = 1) -> Place:
    return Place(frozenset(range(cores * ranks)), cores, ranks, gpu)


@pytest.fixture
def built_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (4, 1), (8, 2), (64, 16), (256, 16)])
def test_workers_on_the_cpu_leave_the_cores_to_the_training(cores: int, workers: int) -> None:
    assert default_workers(cores, gpu=False) == workers
    assert cores - workers >= cores // 2


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (8, 7), (17, 16), (96, MAX_WORKERS)])
@pytest.mark.usefixtures("built_for_gpus")
def test_workers_beside_a_gpu_leave_one_core(cores: int, workers: int) -> None:
    args = loader_args(place=place(cores, gpu=True))
    assert args["num_workers"] == workers
    assert args["pin_memory"] is True


def test_a_gpu_that_this_torch_cannot_use_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert loader_args(place=place(8, gpu=True)) == loader_args(place=place(8))
    assert loader_args(place=place(8))["pin_memory"] is False


def test_one_core_has_no_workers_and_nothing_that_needs_them() -> None:
    assert loader_args(place=place(1)) == {"num_workers": 0, "pin_memory": False}
    assert loader_args(place=place(1), prefetch_factor=4) == {"num_workers": 0, "pin_memory": False}


def test_what_is_given_is_kept() -> None:
    given = {"num_workers": 3, "pin_memory": True, "prefetch_factor": 5, "persistent_workers": False}
    assert loader_args(**given, place=place(64)) == given  # type: ignore[arg-type]
    assert loader_args(num_workers=0, place=place(64)) == {"num_workers": 0, "pin_memory": False}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": -1},
        {"prefetch_factor": 0},
        {"num_workers": 0, "prefetch_factor": 2},
        {"num_workers": 0, "persistent_workers": True},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))[:8] if len(wrong) == 1 else "num_workers"):
        loader_args(**wrong, place=place(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("cores", [1, 4])
def test_dataloader_takes_it(cores: int) -> None:
    data = TensorDataset(torch.arange(10.0))
    loader = DataLoader(data, batch_size=5, **loader_args(place=place(cores)))
    for _ in range(2):
        assert [len(batch[0]) for batch in loader] == [5, 5]


def test_cuda_is_not_initialised() -> None:
    loader_args()
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
