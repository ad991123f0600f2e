"""Arguments for torch.utils.data.DataLoader, from what this process was given."""

from __future__ import annotations

from typing import TypedDict

from .place import Place, here

# Readers of one rank rarely feed a GPU faster beyond this, and each costs its own copy of the dataset object.
MAX_WORKERS = 16


class LoaderArgs(TypedDict, total=False):
    """Keyword arguments of DataLoader. Without workers only `num_workers` and `pin_memory` are there, as DataLoader
    refuses the other two then."""

    num_workers: int
    pin_memory: bool
    prefetch_factor: int
    persistent_workers: bool


def loader_args(
    *,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    place: Place | None = None,
) -> LoaderArgs:
    """Arguments for a DataLoader that is read in many epochs: `DataLoader(dataset, batch_size=64, **loader_args())`.

    What is passed here is kept as it is; the rest is chosen:

    num_workers         processes. With a GPU, all cores of this rank but one (the training process needs a core to
                        drive the GPU), at most 16. Without a GPU the training itself needs the cores: a quarter of
                        them, at least one. A single core: 0, a worker would only take turns with the trainer.
    pin_memory          True where this process sees a GPU that its torch can use: copies to it then need no staging
                        buffer and, with `.to(device, non_blocking=True)`, no waiting.
    prefetch_factor     batches that each worker prepares ahead: 2, torch's own default. Memory grows with num_workers *
                        prefetch_factor batches; pass 4 or more where single batches take much longer than others.
    persistent_workers  True: workers outlive an epoch.

    Not for iterable datasets that do not split themselves among workers (each worker would deliver everything), and of
    no use for tensors that are in memory already: pass num_workers=0 there.

    Never initialises CUDA, so it may be called before workers are forked. Raises ValueError for negative numbers, and
    for prefetch_factor or persistent_workers together with num_workers=0.
    Sources: torch.utils.data documentation; PyTorch performance tuning guide, "Enable async data loading".
    """
    if num_workers is not None and num_workers < 0:
        raise ValueError(f"num_workers={num_workers}: a number of processes, 0 or more")
    if prefetch_factor is not None and prefetch_factor < 1:
        raise ValueError(f"prefetch_factor={prefetch_factor}: a number of batches, 1 or more")
    place = here() if place is None else place
    gpu = place.gpu and _torch_uses_gpu()
    workers = default_workers(place.cores, gpu=gpu) if num_workers is None else num_workers
    pinned = gpu if pin_memory is None else pin_memory
    if workers == 0:
        if num_workers == 0 and (prefetch_factor is not None or persistent_workers):
            raise ValueError("prefetch_factor and persistent_workers need num_workers of 1 or more")
        return {"num_workers": 0, "pin_memory": pinned}
    return {
        "num_workers": workers,
        "pin_memory": pinned,
        "prefetch_factor": 2 if prefetch_factor is None else prefetch_factor,
        "persistent_workers": True if persistent_workers is None else persistent_workers,
    }


def default_workers(cores: int, *, gpu: bool) -> int:
    """Worker processes for a rank with `cores` cores."""
    if cores <= 1:
        return 0
    return min(cores - 1, MAX_WORKERS) if gpu else min(max(1, cores // 4), MAX_WORKERS)


def _torch_uses_gpu() -> bool:
    """Whether the installed torch was built for GPUs. Asking for devices would initialise CUDA; the build does not."""
    import torch  # on first use: importing this package must stay cheap

    return bool(torch.version.cuda or getattr(torch.version, "hip", None))
