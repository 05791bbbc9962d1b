"""The one small file whose coming makes a checkpoint: it names all others, and proves them."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import disk
from .readweights import plain_name
from .refusal import reading, refusal
from .seal import check, parse, sealed
from .tensorfile import Written

NAME = "checkpoint.json"  #: not ``*.index.json``, which readers of weights look for
_FORMAT = 1
_LONGEST = 512 << 20  # bytes


class Item(NamedTuple):
    """What is saved of one object: its state without the tensors, and the files with those."""

    tree: Any
    files: list[str]
    #: of each tensor that is spread over ranks: where its parts begin, their shapes and files
    parts: dict[str, list[Any]]


class Manifest(NamedTuple):
    """All that a checkpoint holds, tensors excepted."""

    step: int | None
    objects: dict[str, Item]  #: the same for all ranks
    ranks: list[Item]  #: of each rank's own
    files: dict[str, Written]

    def dump(self) -> bytes:
        """Return the file's content."""
        document = {
            "format": _FORMAT,
            "step": self.step,
            "world_size": len(self.ranks),
            "objects": {name: item._asdict() for name, item in self.objects.items()},
            "ranks": [item._asdict() for item in self.ranks],
            "files": {name: list(written) for name, written in self.files.items()},
        }
        return sealed(document)[0]


def read(directory: str) -> Manifest:
    """Return the manifest in a directory.

    :raises CheckpointError: if there is none, or it is not as it was written.
    """
    path = f"{directory}/{NAME}"
    with reading(path):
        data = disk.read_small(path, _LONGEST)
    document = parse(path, data)
    check(path, data)
    if document.get("format") != _FORMAT:
        expected = f"format {_FORMAT}, this version's"
        raise refusal(path, "made by another version", expected, repr(document.get("format")))
    try:
        return _manifest(path, document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refusal(path, "not a manifest", "its fields", repr(error)) from error


def _manifest(path: str, document: dict[str, Any]) -> Manifest:
    files: dict[str, Written] = {}
    for name, (size, seal) in document["files"].items():
        files[plain_name(path, name)] = Written(int(size), str(seal))
    objects = {name: _item(path, item, files) for name, item in document["objects"].items()}
    ranks = [_item(path, item, files) for item in document["ranks"]]
    step, count = document["step"], document["world_size"]
    if len(ranks) != count or not (step is None or type(step) is int):
        raise refusal(path, "not a manifest", f"{count} ranks", f"{len(ranks)}, step {step!r}")
    return Manifest(step, objects, ranks, files)


def _item(path: str, found: dict[str, Any], files: dict[str, Written]) -> Item:
    item = Item(found["tree"], list(found["files"]), dict(found["parts"]))
    parts = [part for some in item.parts.values() for part in some]
    for offset, shape, _ in parts:
        if len(offset) != len(shape) or not all(type(n) is int and n >= 0 for n in offset + shape):
            raise refusal(path, "a part of a tensor", "where it begins, and its shape", repr(shape))
    for name in (*item.files, *(part[2] for part in parts)):
        if name not in files:
            raise refusal(path, "an object's file", "one of the manifest's files", repr(name))
    return item
