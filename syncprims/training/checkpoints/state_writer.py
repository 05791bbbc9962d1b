"""One rank's view of one save of a state: write its files, commit, or remove what was written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import CheckpointError

from . import filesystem, manifest
from .commit import commit, is_temporary, new_token, temporary, write_files
from .integrity import parse
from .safetensors_file import begins_as_of_state, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .coordination import Team
    from .safetensors_file import FileRecord
    from .save_plan import PlannedFile

_VERSION = r"(?:-\d{5,}-of-\d{5,})?(?:\.v\d+)?\.safetensors"
_RANK_FILE = re.compile(rf"rank-\d{{5,}}{_VERSION}")
_LEFTOVER = re.compile(
    rf"\.{re.escape(manifest.NAME)}(?:\.report-\d+(?:-part)?)?\.tmp-[0-9a-f]{{16}}"
)


class Destination(NamedTuple):
    """Where a save writes: into a new directory under a temporary name, or beside older files."""

    path: str
    folder: str  #: the directory that is written to
    taken: list[str]  #: names that were there before
    token: str  #: unique to this save

    @property
    def is_new(self) -> bool:
        """Whether the directory itself is new."""
        return self.folder != self.path

    @classmethod
    def prepare(cls, path: str) -> Destination:
        """Prepare for a save to `path`. Only the leading rank calls this."""
        parent, name = os.path.split(path)
        filesystem.make_directory(parent)
        for found in filesystem.names(parent):
            if is_temporary(found, name):  # a killed save left it
                filesystem.remove_directory_or_log(f"{parent}/{found}")
        token = new_token()
        if filesystem.exists(path):
            if not filesystem.is_directory(path):
                what = "there is something else in place of a directory"
                raise OSError(errno.ENOTDIR, what, path)
            # Empty or not, it stays: it may be a mount, or have access rights of its own.
            return cls(path, path, filesystem.names(path), token)
        new = cls(path, f"{parent}/{temporary(name, token)}", [], token)
        try:
            filesystem.make_directory(new.folder)
        except BaseException:
            new.remove()
            raise
        return new

    def remove(self) -> None:
        """Remove the directory if it is new and still has its temporary name."""
        if self.is_new:
            filesystem.remove_directory_or_log(self.folder)


def removed_by_others(doing: str, what: str) -> CheckpointError:
    """Return the error for a save whose files are gone: its checkpoint could not be loaded."""
    return CheckpointError(
        f"{doing}: another save, or a person, has removed {what} while ranks still wrote there"
    )


class StateWriter(NamedTuple):
    """One rank's view of a save."""

    doing: str
    team: Team
    destination: Destination
    files: list[PlannedFile]
    manifest: manifest.Manifest
    on_commit: Callable[[], None] | None = None  #: called on the leading rank

    def own_files(self) -> list[PlannedFile]:
        """Return the files that this rank writes."""
        return [file for file in self.files if file.writer == self.team.number]

    def write(self, *, quiet: bool = False) -> dict[str, list[Any]]:
        """Write this rank's files; return the file record of each."""

        def write(path: str, tensors: Any, on_progress: Any) -> FileRecord:
            return write_safetensors(path, tensors, {}, on_progress, of_state=True)

        folder, index = self.destination.folder, self.team.number
        return write_files(folder, self.files, index, "saving the state", write, quiet=quiet)

    def remove_own_files(self) -> None:
        """Remove this rank's files."""
        for file in self.own_files():
            filesystem.remove_or_log(f"{self.destination.folder}/{file.name}")

    def clean_up(self) -> None:
        """Remove what this rank is responsible for, after a failure on any rank."""
        self.remove_own_files()  # also on the leading rank: all of them, whatever the others did
        if self.team.leads:
            self.abandon()

    def report_path(self, index: int, suffix: str = "") -> str:
        """Return the file in which the rank of this index reports to the leading rank.

        The leading rank's own says that it waits for reports.
        """
        name = temporary(f"{manifest.NAME}.report-{index}{suffix}", self.destination.token)
        return f"{self.destination.folder}/{name}"

    def abandon(self) -> None:
        """Remove everything that a failed save has made. The leading rank does it first."""
        filesystem.remove_or_log(self.report_path(0))
        self.destination.remove()
        if self.destination.is_new:
            return
        folder = self.destination.folder
        filesystem.remove_each_or_log(folder, lambda name: _LEFTOVER.fullmatch(name) is not None)
        for state in (*self.manifest.objects.values(), *self.manifest.ranks):
            for name in state.files:
                filesystem.remove_or_log(f"{folder}/{name}")

    def commit(self, records: Mapping[str, FileRecord]) -> None:
        """Make the new checkpoint the current one. Only the leading rank calls this."""
        path, folder, _, token = self.destination
        final = f"{folder}/{manifest.NAME}"
        is_new = self.destination.is_new
        waiting = final if is_new else f"{folder}/{temporary(manifest.NAME, token)}"
        source, target = (folder, path) if is_new else (waiting, final)
        old: dict[str, Any] = {}

        def prepare() -> None:
            if not is_new:
                with contextlib.suppress(OSError, CheckpointError):  # damaged: nothing is known
                    old.update(parse(final, filesystem.read_small(final, 1 << 30)))
            document = self.manifest._replace(files=dict(records)).dump()
            filesystem.write_small(waiting, document)
            filesystem.sync_directory(folder)
            found = {*filesystem.names(folder)}
            if lost := [name for name in records if name not in found]:
                raise removed_by_others(self.doing, f"{folder}/{lost[0]}")

        commit("checkpoint", prepare, source, target, self.abandon)
        if not is_new:
            self._remove_superseded(old, records)
        if self.on_commit is not None:
            self.on_commit()

    def _remove_superseded(self, old: dict[str, Any], records: Mapping[str, FileRecord]) -> None:
        """Remove the older checkpoint's files, and what killed saves left.

        A file that only has such a name stays: it may be a model that was saved beside the state.
        """
        folder = self.destination.folder
        parts = (old.get(part) for part in ("objects", "files"))
        objects, listed = (part if isinstance(part, dict) else {} for part in parts)
        names = (*self.manifest.objects, *objects)
        patterns = [re.compile(re.escape(name) + _VERSION) for name in names] + [_RANK_FILE]

        def is_old(name: str) -> bool:
            if name in records or not any(kind.fullmatch(name) for kind in patterns):
                return _LEFTOVER.fullmatch(name) is not None
            return name in listed or begins_as_of_state(f"{folder}/{name}")

        filesystem.remove_each_or_log(folder, is_old)
