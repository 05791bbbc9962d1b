"""Digests of tensors: equal for equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

from .arrays import flat, is_tensor, on_host, raw

Digests = dict[str, int]  # by the name of a tensor


def digest_tensors(tensors: Iterable[tuple[str, Any]]) -> Digests:
    """Return the digest of each tensor that is plain memory."""
    return {
        name: crc32(raw(flat(on_host(tensor.detach()))))
        for name, tensor in tensors
        if is_tensor(tensor) and _is_plain(tensor)
    }


def _is_plain(tensor: Any) -> bool:
    import torch

    return (
        not torch.nn.parameter.is_lazy(tensor)
        and type(tensor.data) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )
