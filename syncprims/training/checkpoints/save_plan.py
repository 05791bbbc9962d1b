"""The plan of a save: which tensors go into which file, and which rank writes it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from .dtensor import is_dtensor
from .integrity import digest
from .safetensors_file import byte_size, content_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    Tensors = dict[str, torch.Tensor]


class PlannedFile(NamedTuple):
    """A file to write."""

    name: str
    writer: int  #: index of the rank that writes it
    tensors: Mapping[str, torch.Tensor]


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as an int or as ``"5GB"``, ``"500MB"``, ``"2GiB"``.

    :raises ValueError: if it is neither, or not positive.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is not None:
            base = 1024 if match[3] else 1000
            size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"max_shard_size={size!r}: it takes a number of bytes, or as '5GB'")
    return size


def split_by_size(tensors: Tensors, most: int) -> list[Tensors]:
    """Return the tensors in groups of at most `most` bytes, in order; a larger one is alone."""
    groups: list[Tensors] = [{}]
    left = most
    for name, tensor in tensors.items():
        size = byte_size([tensor])
        if size > left and groups[-1]:
            groups.append({})
            left = most
        groups[-1][name] = tensor
        left -= size
    return groups


def group_names(name: str, count: int) -> list[str]:
    """Return the names of the files of so many groups: `name` itself, or with numbers."""
    if count == 1:
        return [name]
    stem, _, ending = name.rpartition(".")
    return [f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}" for number in range(count)]


def describe(tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return, as JSON, what replicas of the tensors have in common."""
    return [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]


def group_digests(groups: Sequence[Tensors]) -> list[str]:
    """Return a digest of each group's content. DTensors do not count: no rank has another one."""
    return [
        digest("".join(content_digest(t) for t in group.values() if not is_dtensor(t)).encode())
        for group in groups
    ]


def assign_writers(
    names: Sequence[str], groups: Sequence[Tensors], digests: Sequence[Sequence[str]]
) -> list[PlannedFile]:
    """Return the file of each group, and which rank writes it.

    `digests` are those of each rank's groups. A rank may write what equals main's, bit for bit. So
    what differs between ranks, as the running statistics of a batch norm, is always main's. The
    largest groups are assigned first, each to the rank with the least to do.
    """
    sizes = [byte_size(group.values()) for group in groups]
    load = [0] * len(digests)
    writers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        able = [rank for rank, one in enumerate(digests) if one[number] == digests[0][number]]
        writer = min(able, key=lambda rank: (load[rank], rank))
        writers[number] = writer
        load[writer] += sizes[number]
    return [PlannedFile(*one) for one in zip(names, writers, groups, strict=True)]
