"""The manifest of a saved state: the small file that names all others, with their digests.

A directory holds a checkpoint if and only if it holds a manifest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from syncprims import CheckpointError

from . import integrity
from .integrity import check_file_name, refusal

NAME = "checkpoint.json"  #: not ``*.index.json``, which readers of weights look for
_FORMAT = 2
_LONGEST = 512 << 20  # bytes


class SavedState(NamedTuple):
    """The saved state of one object: its tree without tensors, and the files with the tensors."""

    tree: Any
    files: list[str]  #: shards of DTensors excepted, whose nodes name their files


class Manifest(NamedTuple):
    """Everything that a checkpoint holds except the tensors."""

    step: int | None
    objects: dict[str, SavedState]  #: the same for all ranks
    ranks: list[SavedState]  #: of the rank objects, by rank
    files: dict[str, str]  #: the digest of each file

    def dump(self) -> bytes:
        """Return the file's content."""
        return integrity.dump_sealed(
            {"format": _FORMAT, **self._asdict(), "world_size": len(self.ranks)}
        )


def read(directory: str) -> Manifest:
    """Return the manifest in a directory.

    :raises CheckpointError: if there is none, or it is not as it was written.
    """
    path = f"{directory}/{NAME}"
    document = integrity.load_sealed(path, _LONGEST)
    if document.get("format") != _FORMAT:
        expected = f"format {_FORMAT}, this version's"
        raise refusal(path, "made by another version", expected, repr(document.get("format")))
    try:
        files = {check_file_name(path, n): str(digest) for n, digest in document["files"].items()}
        objects = {name: SavedState(*state) for name, state in document["objects"].items()}
        ranks = [SavedState(*state) for state in document["ranks"]]
        step, count = document["step"], document["world_size"]
        unlisted = {n for state in (*objects.values(), *ranks) for n in state.files} - files.keys()
    except (AttributeError, KeyError, TypeError) as error:
        raise refusal(path, "not a manifest", "its fields", repr(error)) from error
    if len(ranks) != count or not (step is None or type(step) is int):
        raise refusal(path, "not a manifest", f"{count} ranks", f"{len(ranks)}, step {step!r}")
    if unlisted:
        raise refusal(path, "an object's file", "one of the manifest's files", repr(unlisted))
    return Manifest(step, objects, ranks, files)


def listed_files(directory: str) -> set[str]:
    """Return the names of the files of the state in a directory; none if it cannot be loaded."""
    try:
        return {*read(directory).files}
    except CheckpointError:
        return set()
