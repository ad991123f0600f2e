"""Settings for the inside of a training program, from the CPUs and GPUs that this process was given.

    from torchtuned.torch import loader_args, tune

    loading = loader_args()
    tune(cudnn_benchmark=True, loader_workers=loading["num_workers"])
    loader = DataLoader(dataset, batch_size=64, shuffle=True, **loading)

Works with and without `torchtuned-run` (under it, the process' own CPU mask is the grant), with any torch from 1.13 on,
on Python 3.10 and newer. Needs nothing but torch, and imports that only when one of the two functions is called. What
the user has set stays, and nothing here initialises CUDA.
"""

from __future__ import annotations

from .loader import LoaderArgs, loader_args
from .place import Place, here
from .tuning import Change, Tuned, tune

__all__ = ["Change", "LoaderArgs", "Place", "Tuned", "here", "loader_args", "tune"]
