"""A weak disk: what may be found after a power cut, given the calls that were made before it.

Nothing but a sync makes anything last. Of a file that was not synced, the content may be what it
was at its last sync, all of it, half, or zeros. Of the changes to a directory since its last sync
(names made, changed, removed), any selection may be found, in whatever order they were made; a
rename is one change.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_ALL_SELECTIONS = 7  # of so many changes; of more, each alone, each left out, and each beginning


class File:
    """A file's content, now and as of its last sync."""

    def __init__(self, content: bytes = b"", *, lasting: bool = False) -> None:
        self.now = bytearray(content)
        self.lasting = content if lasting else b""

    def states(self) -> list[bytes]:
        """Return what may be found in it."""
        now = bytes(self.now)
        if now == self.lasting:
            return [now]
        return [self.lasting, now, now[: len(now) // 2], bytes(len(now))]


class Change(NamedTuple):
    """What one call did to the names in a directory."""

    removes: str | None
    adds: tuple[str, Any] | None


class Directory:
    """Names, as of the last sync, and the changes since."""

    def __init__(self) -> None:
        self.lasting: dict[str, Any] = {}
        self.changes: list[Change] = []

    def now(self) -> dict[str, Any]:
        """Return the names that a program sees."""
        return self._with(self.changes)

    def sync(self) -> None:
        """Let all changes last."""
        self.lasting, self.changes = self.now(), []

    def _with(self, changes: list[Change]) -> dict[str, Any]:
        names = dict(self.lasting)
        for change in changes:
            if change.removes is not None:
                names.pop(change.removes, None)
            if change.adds is not None:
                names[change.adds[0]] = change.adds[1]
        return names

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield the names that may be found."""
        count = len(self.changes)
        numbers = range(count)
        selections: set[tuple[int, ...]] = set()
        if count <= _ALL_SELECTIONS:
            for size in range(count + 1):
                selections |= set(itertools.combinations(numbers, size))
        else:
            selections |= {tuple(range(size)) for size in range(count + 1)}
            selections |= {(one,) for one in numbers}
            selections |= {tuple(n for n in numbers if n != one) for one in numbers}
        for selection in sorted(selections):
            yield self._with([self.changes[n] for n in selection])


class WeakDisk:
    """Follows the calls of a save, and tells what could be found after each."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.tree = self._read(self._root)
        self._open: dict[int, Any] = {}

    def _read(self, path: str) -> Directory:
        found = Directory()
        for entry in os.scandir(path):
            if entry.is_dir():
                found.lasting[entry.name] = self._read(entry.path)
            else:
                found.lasting[entry.name] = File(Path(entry.path).read_bytes(), lasting=True)
        return found

    def _find(self, path: str) -> Any:
        node: Any = self.tree
        inner = os.path.relpath(path, self._root)
        for name in [] if inner == "." else inner.split("/"):
            node = node.now()[name]
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._find(str(Path(path).parent)), Path(path).name

    def follow(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """Do what a call has done; tell whether that changed anything."""
        if name == "open":
            if args[1] & os.O_CREAT:
                directory, base = self._parent(args[0])
                directory.changes.append(Change(None, (base, File())))
            self._open[result] = self._find(args[0])
        elif name == "write":
            self._open[args[0]].now += bytes(args[1])[:result]
        elif name == "pwrite":
            fd, data, at = args
            self._open[fd].now[at : at + result] = bytes(data)[:result]
        elif name == "fsync":
            node = self._open[args[0]]
            if isinstance(node, Directory):
                node.sync()
            else:
                node.lasting = bytes(node.now)
        elif name == "mkdir":
            directory, base = self._parent(args[0])
            directory.changes.append(Change(None, (base, Directory())))
        elif name == "rename":
            directory, base = self._parent(args[0])
            assert Path(args[1]).parent == Path(args[0]).parent
            directory.changes.append(Change(base, (Path(args[1]).name, self._find(args[0]))))
        elif name in ("unlink", "rmdir"):
            directory, base = self._parent(args[0])
            directory.changes.append(Change(base, None))
        else:
            return False
        return True

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield what may be found: names, and under them contents, or more names."""
        yield from self._states(self.tree)

    def _states(self, node: Any) -> Iterator[Any]:
        if isinstance(node, File):
            yield from node.states()
            return
        for names in node.states():
            inner = [list(self._states(child)) for child in names.values()]
            for contents in itertools.product(*inner):
                yield dict(zip(names, contents, strict=True))


def freeze(state: Any) -> Any:
    """Return what is equal for equal states, and can be looked up."""
    if isinstance(state, bytes):
        return state
    return tuple((name, freeze(child)) for name, child in sorted(state.items()))


def lay_out(state: dict[str, Any], folder: Path) -> None:
    """Make files and directories of a state."""
    folder.mkdir()
    for name, child in state.items():
        if isinstance(child, bytes):
            (folder / name).write_bytes(child)
        else:
            lay_out(child, folder / name)
