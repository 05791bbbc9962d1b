"""Memory: released, and not exceeded."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from syncprims import all_reduce, get_world_size


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return unused memory of the device to the system."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available() and hasattr(torch.cuda, "empty_cache"):
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free unused memory, and return a None for each object: assign them to its names."""
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an error says that memory was exceeded."""
    texts = (" out of memory.", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    text = str(exception)
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exception, RuntimeError) and any(part in text for part in texts)
    )


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """Call ``function(batch_size, ...)`` with smaller sizes, by default 0.9 times, until it fits.

    The next call begins with the size that fitted. All ranks go on with the same size: if it did
    not fit on one, all try the next. This does not help if a rank runs out of memory while the
    others wait for it in a collective.

    :raises RuntimeError: if no size fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal starting_batch_size
        size = starting_batch_size
        while size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                result, fits = function(size, *args, **kwargs), 1
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                result, fits = None, 0
            if (get_world_size() == 1 or all_reduce(fits, "min")) and fits:
                starting_batch_size = size
                return result
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.")

    return call
