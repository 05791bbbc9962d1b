"""The files of a model's directory: their names, which of them is the model, and how it changes.

A directory may hold a model in four ways. Readers take the first one that is there: a single
safetensors file, an index of safetensors shards, and the same two in torch's format. So a model is
replaced by one step: the rename of its first file (a single file, or an index), or, where an older
one would still be read before it, the removal of that.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from . import disk
from .together import log


class Format(NamedTuple):
    """How the files of a format are called."""

    stem: str
    ending: str

    @property
    def single(self) -> str:
        """The file that holds a whole model."""
        return f"{self.stem}.{self.ending}"

    @property
    def listing(self) -> str:
        """The file that says which shard holds what."""
        return f"{self.single}.index.json"

    def shard(self, number: int, count: int, version: int) -> str:
        """Return the name of a shard; `version` tells it from those of older saves."""
        return versioned(f"{self.stem}-{number + 1:05d}-of-{count:05d}.{self.ending}", version)


FILES = "syncprims.files"  #: in an index's metadata: size and seal of each shard
SAFE = Format("model", "safetensors")
TORCH = Format("pytorch_model", "bin")
#: The ways to hold a model, in the order in which they are looked for.
FIRST_FILES = (SAFE.single, SAFE.listing, TORCH.single, TORCH.listing)
_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5,}-of-\d{5,}(?:\.v\d+)?\.(?:safetensors|bin)")
_TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9a-f]{16}")


def is_models(name: str) -> bool:
    """Tell whether a model's save replaces, or removes, a file of this name."""
    return name in FIRST_FILES or _SHARD.fullmatch(name) is not None


def versioned(name: str, version: int) -> str:
    """Return ``model.v2.safetensors`` for the second version of ``model.safetensors``."""
    if version == 1:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.v{version}{dot}{ending}"


def unused_version(names: list[str], taken: list[str]) -> int:
    """Return the lowest version in which none of `names` is taken."""
    version, used = 1, set(taken)
    while any(versioned(name, version) in used for name in names):
        version += 1
    return version


def unique() -> str:
    """Return a text that nobody else gets; Python's random numbers go on as if it had not."""
    return secrets.token_hex(8)


def temporary(name: str, token: str) -> str:
    """Return the name of what will be called `name`, until then."""
    return f".{name}.tmp-{token}"


def is_temporary(found: str, name: str) -> bool:
    """Tell whether `found` is a temporary of `name`, which only a killed save leaves behind."""
    match = _TEMPORARY.fullmatch(found)
    return match is not None and match[1] == name


class Replacement:
    """One change of the model in a directory, by the one rank that makes it."""

    def __init__(self, directory: str, first: str, made: list[str]) -> None:
        """Prepare to make `first`, one of FIRST_FILES, the model; `made` are its shards."""
        self.committed = False
        self._renamed = False
        self._directory = directory
        self._first = first
        self._made = made

    def commit(self, temporary_name: str) -> None:
        """Let the file of that temporary name become the model, durably.

        :raises OSError: if that cannot be done; :attr:`committed` tells whether it is done anyway.
        """
        directory, first = self._directory, self._first
        disk.sync_directory(directory)
        found = disk.names(directory)
        before = [name for name in FIRST_FILES[: FIRST_FILES.index(first)] if name in found]
        if before[1:]:  # shadowed by the first of them: nobody reads these, until that is gone
            for name in before[1:]:
                disk.remove(f"{directory}/{name}")
            disk.sync_directory(directory)
        self._rename(temporary_name, before)
        disk.sync_directory(directory)
        if before:
            disk.remove(f"{directory}/{before[0]}")
            self.committed = True
            disk.sync_directory(directory)

    def _rename(self, temporary_name: str, before: list[str]) -> None:
        directory = self._directory
        source = f"{directory}/{temporary_name}"
        try:
            disk.rename(source, f"{directory}/{self._first}")
        except OSError:
            # A network file system may have done it, and lost the answer.
            self.committed = not before and not disk.exists(source)
            raise
        self._renamed, self.committed = True, not before

    def clear_superseded(self) -> None:
        """Remove what the new model replaces. What cannot be removed is reported, and harmless."""
        for name in names_or_report(self._directory):
            replaced = is_models(name) and name != self._first and name not in self._made
            if replaced or any(is_temporary(name, entry) for entry in FIRST_FILES):
                remove_or_report(f"{self._directory}/{name}")

    def undo(self, temporary_name: str) -> None:
        """Remove what was made, after a failure before the commit."""
        first = [self._first] if self._renamed else []
        for name in (*first, temporary_name, *self._made):
            remove_or_report(f"{self._directory}/{name}")


def remove_or_report(path: str) -> None:
    """Remove a file that nobody needs; if that fails, say so and go on."""
    try:
        disk.remove(path)
    except OSError as error:
        log().warning("could not remove %s (%s): it is of no use any more, remove it", path, error)


def names_or_report(directory: str) -> list[str]:
    """Return what is in a directory, to be cleared; if that fails, say so, and nothing."""
    try:
        return disk.names(directory)
    except OSError as error:
        log().warning("%s was not cleared of what is of no use any more: %s", directory, error)
        return []
