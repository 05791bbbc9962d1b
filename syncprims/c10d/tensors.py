"""Tensors of a collective: what their label says, and their items in the host's memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from syncprims._data.arrays import flat

_LONGEST = 120  # bytes of a text that names tensors


@functools.lru_cache(maxsize=4096)
def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Return ``float32[4, 2]``: what must agree on all ranks."""
    if len(tensors) == 1:
        return _describe(tensors[0].dtype, tuple(tensors[0].shape))
    return shorten(", ".join(_describe(one.dtype, tuple(one.shape)) for one in tensors))


def shorten(text: str) -> str:
    """Return `text`, or, if it is too long for a label, its beginning and a digest of it."""
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[: _LONGEST - 20]}... ({digest})"


def items_of(tensor: torch.Tensor) -> Any:
    """Return the items of a tensor in the host's memory: the very memory, where it can be."""
    plain = tensor.detach()
    return flat(plain if plain.device.type == "cpu" else plain.cpu())


@functools.cache
def nothing() -> Any:
    """Return the items of a tensor that has none."""
    return items_of(torch.empty(0, dtype=torch.uint8))


class OutputTensors:
    """Tensors that a call fills: their :attr:`items` first, in the host's memory.

    As a context manager, it gives the items, and finishes unless there was an error. Autograd does
    not see the writing, as with torch's own backends.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.items: list[Any] = []
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Another thread may finish, where another stream is the current one.
        on_cuda = [tensor.device for tensor in tensors if tensor.is_cuda]
        self._stream = torch.cuda.current_stream(on_cuda[0]) if on_cuda else None
        for tensor in tensors:
            plain = tensor.data
            ready = plain.device.type == "cpu" and plain.is_contiguous()
            if not ready or plain.is_conj() or plain.is_neg():
                room = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
                self._elsewhere.append((plain, room))
                plain = room
            self.items.append(flat(plain))

    def finish(self) -> None:
        """Copy the items to tensors that are elsewhere, or not contiguous."""
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for tensor, room in self._elsewhere:
                tensor.copy_(room)

    def __enter__(self) -> list[Any]:
        return self.items

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finish()
