"""Prepared loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from syncprims.training import PreparedLoader
from syncprims.training import prepare_data_loader as _prepare
from syncprims.training import skip_first_batches as _skip_first_batches
from syncprims.training.data.sampling import SeedableRandomSampler as SeedableRandomSampler

from .utils import DataLoaderConfiguration

__all__ = ["SeedableRandomSampler", "prepare_data_loader", "skip_first_batches"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    *,
    rng_types: object = None,
    put_on_device: bool = False,
    dispatch_batches: bool | None = None,
    **options: Any,
) -> PreparedLoader[Any]:
    """Return a loader of this rank's batches. The ranks are those of the world. Collective.

    `options` are other fields of :class:`DataLoaderConfiguration`; Accelerate's about ranks and
    random numbers mean nothing here.
    """
    config = DataLoaderConfiguration(split_batches, dispatch_batches, **options)
    return _prepare(dataloader, device=device if put_on_device else None, **loader_options(config))


def loader_options(config: Any) -> dict[str, Any]:
    """Return the options of the part's function that a configuration of loaders represents."""
    names = ("split_batches", "dispatch_batches", "even_batches", "non_blocking")
    order = "seedable" if config.use_seedable_sampler else "torch"
    return {
        **{name: getattr(config, name) for name in names},
        "seed": config.data_seed,
        # The only order that a state can hold.
        "order": "seeded" if config.use_stateful_dataloader else order,
        "skip_finished": True,
    }


def skip_first_batches(dataloader: object, num_batches: int = 0) -> Any:
    """Return a view of a loader without its first batches."""
    return _skip_first_batches(dataloader, num_batches)
