"""One save of a state: where it goes, who writes which file, and how it comes to be all at once."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import CheckpointError

from . import disk, manifest
from .messages import is_leftover, stop_listening
from .meter import metered
from .seal import parse
from .tensorfile import Written, begins_as_of_state, write
from .together import log
from .weightfiles import is_temporary, names_or_report, remove_or_report, temporary, unique

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from .together import Team

_VERSION = r"(?:-\d{5,}-of-\d{5,})?(?:\.v\d+)?\.safetensors"
_RANK = re.compile(rf"rank-\d{{5,}}{_VERSION}")


class Place(NamedTuple):
    """Where a save goes: a directory of its own that gets its name last, or over an older save."""

    path: str
    folder: str  #: where its files are written
    taken: list[str]  #: names that are there already
    token: str  #: that no other save has

    @property
    def fresh(self) -> bool:
        """Tell whether the directory itself is new."""
        return self.folder != self.path

    @classmethod
    def prepare(cls, path: str) -> Place:
        """Make ready for a save to `path`; done by the leading rank only."""
        parent, name = os.path.split(path)
        disk.make_directory(parent)
        for found in disk.names(parent):
            if is_temporary(found, name):
                remove_directory_or_report(f"{parent}/{found}")  # of a save that was killed
        token = unique()
        if disk.exists(path) and not disk.is_directory(path):
            raise OSError(errno.ENOTDIR, "there is something else in place of a directory", path)
        if disk.exists(path):
            # Empty or not, it stays: it may be a mount, or have rights of its own.
            return cls(path, path, disk.names(path), token)
        place = cls(path, f"{parent}/{temporary(name, token)}", [], token)
        try:
            disk.make_directory(place.folder)
        except BaseException:
            place.give_up()
            raise
        return place

    def give_up(self) -> None:
        """Remove the directory, if it is one of this save's own and has not got its name."""
        if self.fresh:
            remove_directory_or_report(self.folder)


class File(NamedTuple):
    """A file to be written."""

    name: str
    owner: int  #: the place of the rank that writes it
    tensors: Mapping[str, torch.Tensor]


class Job(NamedTuple):
    """One rank's view of a save."""

    doing: str
    team: Team
    place: Place
    files: list[File]
    manifest: manifest.Manifest
    after: Callable[[], None] | None = None  #: what the leading rank does then

    def own(self) -> list[File]:
        """Return the files that this rank writes."""
        return [file for file in self.files if file.owner == self.team.place]

    def write(self, *, quiet: bool = False) -> dict[str, list[Any]]:
        """Write this rank's files; return size and seal of each. If that fails, none is left."""
        written: dict[str, list[Any]] = {}
        files = self.own()
        total = sum(t.numel() * t.element_size() for file in files for t in file.tensors.values())
        try:
            with metered("saving the state", total, quiet=quiet) as meter:
                for file in files:
                    path = f"{self.place.folder}/{file.name}"
                    written[file.name] = list(write(path, file.tensors, {}, meter, of_state=True))
        except BaseException:
            self.remove_own()
            raise
        return written

    def remove_own(self) -> None:
        """Remove this rank's files."""
        for file in self.own():
            remove_or_report(f"{self.place.folder}/{file.name}")

    def abandon(self) -> None:
        """Remove what is left of a save that has failed; done by the leading rank first."""
        stop_listening(self)
        place = self.place
        place.give_up()
        if place.fresh:
            return
        for name in names_or_report(place.folder):
            if is_leftover(name):
                remove_or_report(f"{place.folder}/{name}")
        for item in (*self.manifest.objects.values(), *self.manifest.ranks):
            for name in item.files:
                remove_or_report(f"{place.folder}/{name}")

    def commit(self, written: list[dict[str, list[Any]]]) -> None:
        """Let the new checkpoint be the one in the directory; done by the leading rank."""
        files = {name: Written(*facts) for some in written for name, facts in some.items()}
        change = _Change(self.place)
        try:
            change.commit(self.manifest._replace(files=files).dump())
        except BaseException as error:
            if not change.committed:
                self.abandon()
            elif isinstance(error, OSError):
                raise CheckpointError(
                    f"the new checkpoint is in place, but may not outlive a loss of power: {error}",
                    path=error.filename, errno=error.errno,
                ) from error  # fmt: skip
            raise
        change.clear_superseded(self.manifest, set(files))
        if self.after is not None:
            self.after()


class _Change:
    """The one step in which a new checkpoint comes to be."""

    def __init__(self, place: Place) -> None:
        self.committed = False
        self._place = place
        self._old: dict[str, Any] = {}

    def commit(self, document: bytes) -> None:
        """Let the manifest, or the directory with it, get its name, durably."""
        path, folder, _, token = self._place
        if self._place.fresh:
            disk.write_small(f"{folder}/{manifest.NAME}", document)
            disk.sync_directory(folder)
            self._rename(folder, path)
            disk.sync_directory(os.path.dirname(path))  # noqa: PTH120
            return
        self._old = self._older()
        waiting = f"{folder}/{temporary(manifest.NAME, token)}"
        disk.write_small(waiting, document)
        disk.sync_directory(folder)
        self._rename(waiting, f"{folder}/{manifest.NAME}")
        disk.sync_directory(folder)

    def _rename(self, source: str, target: str) -> None:
        try:
            disk.rename(source, target)
        except OSError:
            # A network file system may have done it, and lost the answer.
            self.committed = not disk.exists(source)
            raise
        self.committed = True

    def _older(self) -> dict[str, Any]:
        """Return what the manifest says that will be replaced, whatever state it is in."""
        path = f"{self._place.path}/{manifest.NAME}"
        try:
            return parse(path, disk.read_small(path, 1 << 30))
        except (OSError, CheckpointError):
            return {}

    def clear_superseded(self, new: manifest.Manifest, files: set[str]) -> None:
        """Remove what the new checkpoint replaces, and what killed saves have left.

        What only has a name as these is somebody's: a model that was saved beside the state.
        """
        if self._place.fresh:
            return
        folder = self._place.folder
        objects, listed = (self._old.get(part) for part in ("objects", "files"))
        old: Any = objects if isinstance(objects, dict) else {}
        known: Any = listed if isinstance(listed, dict) else {}
        ours = [re.compile(re.escape(name) + _VERSION) for name in (*new.objects, *old)]
        for name in names_or_report(folder):
            path = f"{folder}/{name}"
            state = any(kind.fullmatch(name) for kind in (*ours, _RANK)) and name not in files
            if is_leftover(name) or (state and (name in known or _is_of_state(path))):
                remove_or_report(path)


def _is_of_state(path: str) -> bool:
    try:
        return begins_as_of_state(path)
    except OSError as error:
        log().warning("%s stays, whatever it is: %s", path, error)
        return False


def remove_directory_or_report(path: str) -> None:
    """Remove a directory of files that nobody needs; if that fails, say so and go on."""
    try:
        disk.remove_directory(path)
    except OSError as error:
        log().warning("could not remove %s (%s): it is of no use any more, remove it", path, error)
