"""Prepared loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from syncprims.training import PreparedLoader
from syncprims.training import prepare_data_loader as _prepare
from syncprims.training import skip_first_batches as _skip_first_batches
from syncprims.training.data.sampling import SeedableRandomSampler as SeedableRandomSampler

from .utils import find_name as _find_name

__all__ = ["SeedableRandomSampler", "prepare_data_loader", "skip_first_batches"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    *,
    rng_types: Any = None,
    put_on_device: bool = False,
    dispatch_batches: bool | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    use_stateful_dataloader: bool = False,
    **options: Any,
) -> PreparedLoader[Any]:
    """Return a loader of this rank's batches. The ranks are those of the world. Collective.

    `options` are those of :func:`syncprims.training.prepare_data_loader`; Accelerate's about ranks
    and random numbers mean nothing here.
    """
    if dispatch_batches is None and not put_on_device:
        dispatch_batches = False
    return _prepare(
        dataloader,
        device=device if put_on_device else None,
        split_batches=split_batches,
        seed=data_seed,
        dispatch_batches=dispatch_batches,
        order=order_of(use_stateful_dataloader, use_seedable_sampler),
        skip_finished=True,
        **options,
    )


def order_of(stateful: bool, seedable: bool) -> str:
    """Return the order of shuffled data: ``"seeded"`` is the only one that a state can hold."""
    return "seeded" if stateful else "seedable" if seedable else "torch"


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a view of a loader without its first batches."""
    return _skip_first_batches(dataloader, num_batches)


def __getattr__(name: str) -> Any:
    return _find_name(__name__, name)
