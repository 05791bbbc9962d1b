"""The manifest of a saved state: the small file that names all others, with their digests.

A directory holds a checkpoint if and only if it holds a manifest.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from syncprims import CheckpointError

from . import filesystem
from .integrity import (
    BLANK,
    SEAL,
    check_file_name,
    check_seal,
    dump,
    parse,
    put_seal,
    reading,
    refusal,
)

NAME = "checkpoint.json"  #: not ``*.index.json``, which readers of weights look for
_FORMAT = 2
_LONGEST = 512 << 20  # bytes


class SavedState(NamedTuple):
    """The saved state of one object: its tree without tensors, and the files with the tensors."""

    tree: Any
    files: list[str]
    #: of each DTensor: offset, shape and file of each shard
    parts: dict[str, list[Any]]


class Manifest(NamedTuple):
    """Everything that a checkpoint holds except the tensors."""

    step: int | None
    objects: dict[str, SavedState]  #: the same for all ranks
    ranks: list[SavedState]  #: of the rank objects, by rank
    files: dict[str, str]  #: the digest of each file

    def dump(self) -> bytes:
        """Return the file's content."""
        document = {
            SEAL: BLANK,
            "format": _FORMAT,
            "step": self.step,
            "world_size": len(self.ranks),
            "objects": {name: state._asdict() for name, state in self.objects.items()},
            "ranks": [state._asdict() for state in self.ranks],
            "files": self.files,
        }
        return put_seal(dump(document))


def read(directory: str) -> Manifest:
    """Return the manifest in a directory.

    :raises CheckpointError: if there is none, or it is not as it was written.
    """
    path = f"{directory}/{NAME}"
    with reading(path):
        data = filesystem.read_small(path, _LONGEST)
    document = parse(path, data)
    check_seal(path, data)
    if document.get("format") != _FORMAT:
        expected = f"format {_FORMAT}, this version's"
        raise refusal(path, "made by another version", expected, repr(document.get("format")))
    try:
        files = {check_file_name(path, n): str(digest) for n, digest in document["files"].items()}
        objects = {
            name: _parse_state(path, found, files) for name, found in document["objects"].items()
        }
        ranks = [_parse_state(path, found, files) for found in document["ranks"]]
        step, count = document["step"], document["world_size"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refusal(path, "not a manifest", "its fields", repr(error)) from error
    if len(ranks) != count or not (step is None or type(step) is int):
        raise refusal(path, "not a manifest", f"{count} ranks", f"{len(ranks)}, step {step!r}")
    return Manifest(step, objects, ranks, files)


def _parse_state(path: str, found: dict[str, Any], files: dict[str, str]) -> SavedState:
    state = SavedState(found["tree"], list(found["files"]), dict(found["parts"]))
    parts = [part for some in state.parts.values() for part in some]
    for offset, shape, _ in parts:
        if len(offset) != len(shape) or not all(type(n) is int and n >= 0 for n in offset + shape):
            raise refusal(path, "a part of a tensor", "its offset and shape", repr(shape))
    for name in (*state.files, *(part[2] for part in parts)):
        if name not in files:
            raise refusal(path, "an object's file", "one of the manifest's files", repr(name))
    return state


def listed_files(directory: str) -> set[str]:
    """Return the names of the files of the state in a directory; none if it cannot be loaded."""
    with contextlib.suppress(CheckpointError):
        return {*read(directory).files}
    return set()
