"""Every save: which rank writes which file, and the one step that replaces the old by the new.

Nothing is written to a file that a reader may be reading. New files get unused or temporary names
and are synced. One rename, or one removal, makes them current. Only then are old files removed.

A directory that does not exist yet is written under a temporary name, and its rename is that step.
In a directory that exists it is the rename of one file, the head: the only file, or the one that
lists the others.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from syncprims import CheckpointError, get_rank
from syncprims.training.pytree import is_dtensor

from . import filesystem
from .coordination import check_equal, cleanup_on_error, coordinate, meet
from .integrity import digest, dump
from .safetensors_file import byte_size, content_digest

T = TypeVar("T")
Tensors: TypeAlias = dict[str, torch.Tensor]
Digests: TypeAlias = dict[str, str]  # of files, by name

LOCK_SECONDS = 300.0  # that a save waits for one of another program to the same directory
_TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9a-f]{16}")


# -- the plan -------------------------------------------------------------------------------------


class FilePlan(NamedTuple):
    """A file to write."""

    name: str
    writer: int  #: index of the rank that writes it
    tensors: Mapping[str, torch.Tensor]


class Place(NamedTuple):
    """The place that a save writes to: a new one with a temporary name, or an old one."""

    path: str
    folder: str  #: the directory that is written to
    taken: list[str]  #: names that were there before
    token: str  #: unique to this save

    @property
    def is_new(self) -> bool:
        """Whether the directory itself is new."""
        return self.folder != self.path

    @classmethod
    def prepare(cls, doing: str, path: str, stack: contextlib.ExitStack) -> Place:
        """Prepare for a save to `path`. Only the leading rank calls this.

        No other program saves there until `stack` is closed. If this one fails, the caller removes
        the place first.

        :raises CheckpointError: if another program still does so after :data:`LOCK_SECONDS`.
        """
        filesystem.make_directory(os.path.dirname(path))  # noqa: PTH120
        end = time.monotonic() + LOCK_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                return cls._lock(path, stack)
            if time.monotonic() >= end:
                what = f"{doing}: another save there has not finished within {LOCK_SECONDS:g} s"
                cure = "Wait for its end, or save to another directory."
                raise CheckpointError(f"{what}. {cure}", path=path)
            time.sleep(0.02 + 0.05 * secrets.randbelow(100) / 100)  # of two, one comes first

    @classmethod
    def _lock(cls, path: str, stack: contextlib.ExitStack) -> Place:
        """Return a place that is locked until `stack` is closed.

        :raises BlockingIOError: if another program saves to `path`.
        :raises FileNotFoundError: if another program has just changed something there.
        """
        (parent, name), token = os.path.split(path), secrets.token_hex(8)
        if filesystem.exists(path):
            filesystem.make_directory(path)  # a link to nothing is an error now, and no wait
            # Empty or not, it stays: it may be a mount, or have access rights of its own.
            stack.callback(filesystem.DirectoryLock(path).close)
            return cls(path, path, filesystem.names(path), token)
        new = cls(path, f"{parent}/{temporary(name, token)}", [], token)
        with contextlib.ExitStack() as lock:
            try:
                filesystem.make_directory(new.folder)
                lock.callback(filesystem.DirectoryLock(new.folder).close)
                for entry in filesystem.names(parent):
                    if final_name(entry) == name and f"{parent}/{entry}" != new.folder:
                        remove_unlocked(f"{parent}/{entry}")  # a killed save left it
                if filesystem.exists(path):
                    raise BlockingIOError
            except BaseException:
                new.remove()
                raise
            stack.callback(lock.pop_all().close)
        return new

    def remove(self) -> None:
        """Remove the directory if it is new and still has its temporary name."""
        if self.is_new:
            filesystem.remove_or_log(self.folder, filesystem.remove_directory)


def remove_unlocked(folder: str, away: str | None = None) -> None:
    """Remove a directory, first renamed to `away`; log a failure to remove it.

    :raises BlockingIOError: if another program saves there.
    """
    if filesystem.is_directory(folder):
        with contextlib.closing(filesystem.DirectoryLock(folder)):
            if away is not None:
                filesystem.rename(folder, away)
            filesystem.remove_or_log(away or folder, filesystem.remove_directory)


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


def _group_names(name: str, count: int) -> list[str]:
    """Return the names of the files of so many groups: `name` itself, or with numbers."""
    if count == 1:
        return [name]
    stem, _, ending = name.rpartition(".")
    return [f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}" for number in range(count)]


def with_unused_names(files: list[FilePlan], place: Place) -> list[FilePlan]:
    """Return the files under the lowest version of their names of which none is taken.

    The second version of ``model.safetensors`` is ``model.v2.safetensors``.
    """
    version, names = 1, [file.name for file in files]
    while not set(names).isdisjoint(place.taken):
        version += 1
        parts = [file.name.rpartition(".") for file in files]
        names = [f"{stem}.v{version}{dot}{ending}" for stem, dot, ending in parts]
    return [file._replace(name=name) for file, name in zip(files, names, strict=True)]


# -- the save -------------------------------------------------------------------------------------


class Save:
    """One rank's part in a save that all ranks plan, write and commit together.

    A kind of save sets what there is to save, and says in which files and what readers take.
    """

    structure: Any  #: JSON that is equal for equal objects
    groups: dict[str, list[Tensors]]  #: by the name that the file has if there is only one group
    more: Any = None  #: what else the other ranks need to know
    #: What readers take, the first one that is there. The head is the one that this save replaces.
    heads: Sequence[str]
    head: str
    place: Place
    files: list[FilePlan]  #: of all ranks
    on_commit: Callable[[], None] | None = None  #: called on the leading rank

    def __init__(self, doing: str, ranks: list[int]) -> None:
        self.doing = doing
        self.ranks = ranks
        self.number: int = ranks.index(get_rank())

    def name_files(self, files: list[FilePlan], more: list[Any]) -> None:
        """Set :attr:`files`, from those of the groups and `more`; this may change the head."""
        raise NotImplementedError

    def write_file(self, path: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Write a file, and return its digest."""
        raise NotImplementedError

    def list_files(self, digests: Digests) -> bytes | None:
        """Return the content of the head, if it lists the files."""
        raise NotImplementedError

    def is_ours(self, name: str) -> bool:
        """Return whether a file of this name belongs to the old or the new."""
        raise NotImplementedError

    @property
    def leads(self) -> bool:
        """Whether this rank makes the steps that only one rank may make."""
        return self.number == 0

    # -- the plan ---------------------------------------------------------------------------------

    def summarize(self) -> dict[str, Any]:
        """Return the facts that the other ranks need."""
        groups = [group for groups in self.groups.values() for group in groups]
        described = [
            [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in group.items()]
            for group in groups
        ]
        # DTensors do not count: no rank has another one.
        several = len(self.ranks) > 1 and len(groups) > 1
        plain = [[t for t in g.values() if not is_dtensor(t)] for g in groups if several]
        return {
            "same": digest(dump({"": [described, self.structure]})),
            "digests": [content_digest(tensors) for tensors in plain],
            "more": self.more,
        }

    def assign(self, summaries: list[dict[str, Any]]) -> None:
        """Decide which rank writes which file.

        A rank may write what equals main's, bit for bit. So what differs between ranks, as the
        running statistics of a batch norm, is always main's. The largest groups are assigned
        first, each to the rank with the least to do.
        """
        groups = [group for groups in self.groups.values() for group in groups]
        names = [n for name, some in self.groups.items() for n in _group_names(name, len(some))]
        sizes = [byte_size(group.values()) for group in groups]
        digests = [summary["digests"] for summary in summaries]
        load = [0] * len(summaries)
        writers = [0] * len(sizes)
        for number in sorted(range(len(digests[0])), key=lambda number: -sizes[number]):
            able = [rank for rank, own in enumerate(digests) if own[number] == digests[0][number]]
            writers[number] = min(able, key=lambda rank: (load[rank], rank))
            load[writers[number]] += sizes[number]
        files = [FilePlan(*file) for file in zip(names, writers, groups, strict=True)]
        self.name_files(files, [summary["more"] for summary in summaries])

    # -- the files --------------------------------------------------------------------------------

    def run(self) -> None:
        """Write and commit together with the other ranks.

        :raises CheckpointError: the same on all ranks, if one of them fails.
        """
        try:
            _, written = coordinate(self.doing, self.write)
        except BaseException:
            self.clean_up()
            raise

        def commit_if_leading() -> None:
            if self.leads:
                self.commit(written)

        coordinate(self.doing, commit_if_leading)

    def write(self) -> Digests:
        """Write this rank's files; return their digests. Collective: :meth:`each_own_file`."""
        folder = self.place.folder
        return self.each_own_file(lambda n, tensors: self.write_file(f"{folder}/{n}", tensors))

    def each_own_file(self, work: Callable[[str, Tensors], T]) -> dict[str, T]:
        """Return ``work(name, tensors)`` for each file of this rank, with its DTensors gathered.

        Collective if there are DTensors in a file: every rank takes part in gathering them, also
        after an error of its own.
        """
        results: dict[str, T] = {}
        failure: Exception | None = None
        for name, writer, tensors in self.files:
            writes = writer == self.number and failure is None
            gathered: Tensors = {}
            for key, tensor in tensors.items():
                full = tensor.full_tensor() if is_dtensor(tensor) else tensor
                if writes:  # what others write is not kept
                    gathered[key] = full
            try:
                if writes:
                    results[name] = work(name, gathered)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        return results

    def clean_up(self) -> None:
        """Remove what this rank is responsible for, after a failure on any rank."""
        for name, writer, _ in self.files:
            if writer == self.number:  # the leading rank removes all of them, if the others cannot
                filesystem.remove_or_log(f"{self.place.folder}/{name}")
        if self.leads:
            self.abandon()

    def abandon(self) -> None:
        """Remove everything that a failed save has made. The leading rank does it first."""
        self.place.remove()
        if not self.place.is_new:
            names, ending = {file.name for file in self.files}, self.place.token
            folder = self.place.folder
            filesystem.remove_each_or_log(folder, lambda n: n in names or n.endswith(ending))

    def commit(self, written: Sequence[Digests]) -> None:
        """Make the new files the current ones. Only the leading rank calls this."""
        path, folder, _, token = self.place
        new = self.place.is_new
        waiting = f"{folder}/{self.head if new else temporary(self.head, token)}"
        digests = {name: found for some in written for name, found in some.items()}

        def prepare() -> str | None:
            listing = self.list_files(digests)
            if listing is not None:
                filesystem.write_small(waiting, listing)
            filesystem.sync_directory(folder)
            names = filesystem.names(folder)
            lost = digests.keys() - set(names)
            if lost:
                what = f"another save, or a person, has removed {folder}/{min(lost)}"
                raise CheckpointError(f"{self.doing}: {what} while ranks still wrote there")
            preferred = [n for n in self.heads[: self.heads.index(self.head)] if n in names]
            for name in preferred[1:]:  # hidden by the first of them: no reader reads these now
                filesystem.remove(f"{path}/{name}")
            if preferred[1:]:
                filesystem.sync_directory(path)
            return f"{path}/{preferred[0]}" if preferred else None

        source, target = (folder, path) if new else (waiting, f"{path}/{self.head}")
        replace_durably(prepare, source, target, self.abandon)
        if not new:
            current = {self.head, *digests}

            def is_old(name: str) -> bool:
                left = final_name(name) in self.heads  # by a killed save
                return left or (name not in current and self.is_ours(name))

            filesystem.remove_each_or_log(folder, is_old)
        if self.on_commit is not None:
            self.on_commit()


@contextlib.contextmanager
def planned(
    doing: str,
    path: str,
    make: Callable[[list[int]], Save],
    difference: str,
    until_unlocked: contextlib.ExitStack,
) -> Generator[Save]:
    """Yield the save that all ranks have planned together.

    No other program saves to the directory until `until_unlocked` is closed.

    :raises CheckpointError: on all ranks, if one of them cannot plan it, or has other objects.
    """
    ranks = meet(doing, path)
    save, summaries = coordinate(doing, lambda: make(ranks), lambda save: save.summarize())
    check_equal(doing, ranks, [summary["same"] for summary in summaries], difference)
    places: list[Place] = []  # on the leading rank

    def prepare() -> list[Any]:
        places.extend([Place.prepare(doing, path, until_unlocked)] if save.leads else [])
        return list(places[0]) if places else []

    with cleanup_on_error(doing, lambda: [place.remove() for place in places]):
        _, prepared = coordinate(doing, prepare)
        save.place = Place(*prepared[0])
        save.assign(summaries)
        yield save


def replace_durably(
    prepare: Callable[[], str | None], source: str, target: str, undo: Callable[[], object]
) -> None:
    """Call ``prepare()``, then replace `target` by `source` in one durable step.

    The step is the rename. If ``prepare()`` returns a file that readers prefer to `target`, the
    step is the removal of that file after the rename. If anything fails before the step,
    ``undo()`` removes what was written.

    :raises CheckpointError: if the new is in place, but the directory cannot be synced.
    :raises OSError: if anything fails before the step.
    """
    directory = os.path.dirname(target)  # noqa: PTH120
    ready, preferred = False, None
    try:
        preferred = prepare()
        ready = True
        filesystem.rename(source, target)
        filesystem.sync_directory(directory)
        if preferred is not None:
            filesystem.remove(preferred)
            filesystem.sync_directory(directory)
    except BaseException as error:
        # Look at the files, not at the error: a network file system may lose the answer to a call
        # that succeeded, and a signal handler may raise right after one.
        if not ready or not _is_gone(preferred or source):
            if ready and preferred and _is_gone(source):
                filesystem.remove_or_log(target)
            undo()
        elif isinstance(error, OSError):
            text = f"the new {target} is in place, but may not survive a power loss: {error}"
            raise CheckpointError(text, path=error.filename, errno=error.errno) from error
        raise


def _is_gone(path: str) -> bool:
    with contextlib.suppress(OSError):
        return not filesystem.exists(path)
    return True  # not known: then nothing is removed


def temporary(name: str, token: str = "") -> str:
    """Return the temporary name of what will be called `name`; by default, one of its own."""
    return f".{name}.tmp-{token or secrets.token_hex(8)}"  # Python's random numbers stay


def final_name(name: str) -> str:
    """Return the name that something with a temporary name would have had; "" for other names."""
    match = _TEMPORARY.fullmatch(name)
    return "" if match is None else match[1]
