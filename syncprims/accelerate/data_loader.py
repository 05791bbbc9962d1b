"""Prepared loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from syncprims.training import PreparedLoader
from syncprims.training import prepare_data_loader as _prepare
from syncprims.training import skip_first_batches as _skip_first_batches

from .utils import find_name as _find_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SeedableRandomSampler", "prepare_data_loader", "skip_first_batches"]


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is that of torch's for the seed ``initial_seed + epoch``.

    An iteration that follows another one without :meth:`set_epoch` is of the next epoch.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`."""
        self.epoch, self._iterations = epoch, 0

    def __iter__(self) -> Iterator[int]:
        seed = self.initial_seed + self.epoch + self._iterations
        self._iterations += 1
        self.generator = torch.Generator().manual_seed(seed)
        yield from super().__iter__()


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
    and random numbers mean nothing here. With `use_seedable_sampler` the order follows from a seed,
    as with `use_stateful_dataloader`; it is not the order that Accelerate draws from that seed.
    """
    if dispatch_batches is None and not put_on_device:
        dispatch_batches = False
    return _prepare(
        dataloader,
        device=device if put_on_device else None,
        split_batches=split_batches,
        seed=data_seed,
        dispatch_batches=dispatch_batches,
        seeded=use_stateful_dataloader or use_seedable_sampler,
        skip_finished=True,
        **options,
    )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a view of a loader without its first batches."""
    return _skip_first_batches(dataloader, num_batches)


def __getattr__(name: str) -> Any:
    return _find_name(__name__, name)
