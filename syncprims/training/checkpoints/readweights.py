"""A checkpoint's weights, ours or others': found, proved, and still in their files."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from . import disk, torchfile
from .meter import metered
from .refusal import reading, refusal
from .seal import check, is_ours, parse
from .stored import HeldTensor, StoredTensor, TensorFile
from .tensorfile import OWN, Written
from .weightfiles import FILES, FIRST_FILES

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    Weights = Mapping[str, StoredTensor | HeldTensor]

_INDEX = ".index.json"
_LONGEST_INDEX = 512 << 20  # bytes


@contextlib.contextmanager
def open_weights(path: str, *, follow: bool = False) -> Generator[Weights]:
    """Have the tensors of a weights file, index or directory, proved, for the block.

    :raises CheckpointError: if anything is not as it was written.
    """
    with reading(path):
        if disk.is_directory(path):
            path = _first_file(path)
    with contextlib.ExitStack() as files:
        opener = _Opener(files, follow)
        yield opener.shards(path) if path.endswith(_INDEX) else opener.file(path, None)


def _first_file(directory: str) -> str:
    found = disk.names(directory)
    for name in FIRST_FILES:
        if name in found:
            return f"{directory}/{name}"
    others = [name for name in found if name.endswith(_INDEX)]
    if len(others) == 1:
        return f"{directory}/{others[0]}"
    expected = f"one of {', '.join(FIRST_FILES)}"
    raise refusal(directory, "no model in it", expected, ", ".join(found) or "nothing")


class _Opener:
    """Opens files, to be closed all at once."""

    def __init__(self, files: contextlib.ExitStack, follow: bool) -> None:
        self._files = files
        self._follow = follow

    def file(self, path: str, written: Written | None) -> Weights:
        """Return the tensors of one file, which is the one that was `written`."""
        if not path.endswith(".safetensors"):
            found = torchfile.read(path, written, follow=self._follow)
            held = {id(tensor): HeldTensor(tensor) for tensor in found.values()}
            return {name: held[id(tensor)] for name, tensor in found.items()}
        file = self._files.enter_context(contextlib.closing(TensorFile(path, follow=self._follow)))
        if written is not None:
            written.same_as(path, file)
        with metered("checking weights", file.size) as meter:
            file.prove(meter)
        tensors = file.tensors()
        for other, name in file.metadata.items():  # tied: as the safetensors library notes it, too
            if other not in OWN and other not in tensors and name in tensors:
                tensors[other] = tensors[name]
        return tensors

    def shards(self, path: str) -> Weights:
        """Return the tensors of the files in an index."""
        placed, written = _index(path, self._follow)
        by_file: dict[str, list[str]] = {}
        for name, file in placed.items():
            by_file.setdefault(plain_name(path, file), []).append(name)
        if written and written.keys() != by_file.keys():
            raise refusal(path, "files", ", ".join(sorted(written)), ", ".join(sorted(by_file)))
        tensors: dict[str, StoredTensor | HeldTensor] = {}
        directory = os.path.dirname(path) or os.curdir  # noqa: PTH120
        for file, names in by_file.items():
            found = self.file(f"{directory}/{file}", written.get(file))
            lacking = [name for name in names if name not in found]
            if lacking:
                raise refusal(f"{directory}/{file}", "tensors", ", ".join(lacking), "none of these")
            tensors.update({name: found[name] for name in names})
            # What the index does not list is tied to what it lists, or not meant.
            listed = {id(found[name]) for name in names}
            ties = {n: t for n, t in found.items() if n not in placed and id(t) in listed}
            tensors.update(ties)
        return tensors


def _index(path: str, follow: bool) -> tuple[dict[str, Any], dict[str, Written]]:
    """Return which file each tensor is in, and of our own indexes what was written."""
    with reading(path):
        data = disk.read_small(path, _LONGEST_INDEX, follow=follow)
    index = parse(path, data)
    placed, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(placed, dict):
        raise refusal(path, "not an index", "metadata and weight_map", ", ".join(index))
    written: dict[str, Written] = {}
    if is_ours(data, FILES):
        check(path, data, "metadata")
        written = _written(path, metadata.get(FILES))
    return placed, written


def _written(path: str, found: Any) -> dict[str, Written]:
    try:
        return {plain_name(path, file): Written(*facts) for file, facts in found.items()}
    except (AttributeError, TypeError) as error:
        raise refusal(path, "list of files", "size and seal of each", repr(found)) from error


def plain_name(path: str, name: Any) -> str:
    """Return a file's name, as a file that others wrote gives it.

    :raises CheckpointError: if it could lead out of the directory.
    """
    bad = not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name
    if bad or "\\" in name:
        raise refusal(path, "a file's name", "a name in the same directory", repr(name))
    return name  # type: ignore[no-any-return]
