"""Running worlds of this host, read from outside: what `syncprims who` shows.

The reader is no rank. It copies what it needs out of the files in which the ranks of a host meet,
and maps none of them: a file that is truncated meanwhile would kill it. The copy may be
half-written, damaged, or of another version. The reader never writes, and takes no lock that a rank
needs.

Every rank holds the directory of its world open. So worlds are found wherever they meet, also in
other containers, among the open files of the processes that the reader may look at. Where it may
look at none, it finds those in the places where runs meet by default.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._system.places import list_common_places
from syncprims._system.processes import ProcessIdentity
from syncprims._world.scratch import LOCK
from syncprims.errors import BackendUnavailable, parse_ranks
from syncprims.interface import Label, Settings, State, Status, WaitView

from .finding import BoardView, WorldView

if TYPE_CHECKING:  # in the sources, that package is the folder backends/
    from backends.file import description, liveness, memory, private_dir
else:
    from syncprims.backends.file import description, liveness, memory, private_dir

_BOARD = re.compile(r"board-[0-9a-f]{16}(-here)?")
_WORLD = re.compile(r"/syncprims-[^/]+/world-[1-9][0-9]{0,8}")
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_RANKS = 1 << 16
_LONGEST = 1 << 20  # bytes of a description
_LOOKS = 3  # at a body that is being written
_STORE_TIMEOUT = 10.0  # seconds


class WorldReader:
    """Reads a world in the open directory `fd`, which is `path`."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._namespace = ProcessIdentity.own().namespace

    def close(self) -> None:
        """Close the directory."""
        os.close(self._fd)

    def read(self) -> WorldView | None:
        """Return what can be read now; None once the world has ended and removed its files."""
        if not os.fstat(self._fd).st_nlink:
            return None
        try:
            return self._read()
        except FileNotFoundError:  # it is being created, or ends at this moment
            return None
        except Exception as error:  # a damaged file may fail anywhere
            if not os.fstat(self._fd).st_nlink:
                return None
            name = self.path.rpartition("/world-")[0].rpartition("/syncprims-")[2]
            return WorldView(name, "?", 0, (), {}, {}, {}, _explain(error))

    def _read(self) -> WorldView:
        states: dict[int, Status] = {}
        identities: dict[int, ProcessIdentity] = {}
        with self._opened(liveness.FILE) as fd:
            about = self._about(fd)
            ranks = _ranks(about.ranks)
            for process, rank in zip(about.processes or range(len(ranks)), ranks, strict=True):
                identity, state, detail, failure = self._examine(fd, process)
                states[rank] = Status(0, None, state, detail, failure)
                if identity is not None:
                    identities[rank] = identity
        pids = self._visible_pids(identities)
        boards: list[BoardView] = []
        for file in os.listdir(self._fd):  # noqa: PTH208 - pathlib knows no descriptors
            name = file.removesuffix(description.OF_BOARD)
            if name != file and _BOARD.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    board = description.BoardDescription(*self._description(file))
                    boards.append(self._board(name, board, states, about))
        boards.sort(key=lambda board: (-len(board.members), board.at))
        run_id = about.run_id or self.path.rpartition("/")[0].rpartition("/syncprims-")[2]
        hosts = {rank: name for name, ranks in about.hosts for rank in _ranks(ranks)}
        size = int(about.world_size)
        return WorldView(
            str(run_id), str(about.backend), size, boards, hosts, pids, states, store=about.store
        )

    def _about(self, fd: int) -> description.WorldDescription:
        """Return what is written about the world, before its first process takes an entry.

        :raises FileNotFoundError: if it is being created or removed at this moment.
        """
        magic, count = memory.read_header(fd)
        if magic not in (liveness.MAGIC, b""):
            raise _OtherVersion
        try:
            return description.WorldDescription(*self._description(description.FILE))
        except FileNotFoundError:
            processes = range(min(count, _MOST_RANKS))
            if any(self._examine(fd, process)[1] == "alive" for process in processes):
                raise _OtherVersion from None
            raise

    def _description(self, name: str) -> list[Any]:
        with self._opened(name) as fd:
            fields: list[Any] = json.loads(_copy(fd, min(_LONGEST, os.fstat(fd).st_size)))
        return fields

    # -- processes ------------------------------------------------------------------------------

    def _examine(self, fd: int, process: int) -> tuple[ProcessIdentity | None, State, str, bytes]:
        return liveness.examine_from_outside(self._fd, fd, process, self._namespace)

    def _visible_pids(self, identities: Mapping[int, ProcessIdentity]) -> dict[int, int]:
        """Return the number of each process as this one sees it, of those that it sees."""
        own = self._namespace
        found = {
            rank: identity.pid
            for rank, identity in identities.items()
            if identity.namespace == own and not identity.is_gone(own)
        }
        others = {
            (who.namespace, who.pid): rank
            for rank, who in identities.items()
            if who.namespace not in (own, 0)
        }
        namespaces = {namespace for namespace, _ in others}
        for pid in _processes() if others else ():
            with contextlib.suppress(OSError, ValueError):
                namespace = Path(f"/proc/{pid}/ns/pid").stat().st_ino
                if namespace in namespaces:
                    text = Path(f"/proc/{pid}/status").read_text(errors="replace")
                    inner = int(text.partition("\nNSpid:")[2].partition("\n")[0].split()[-1])
                    if (namespace, inner) in others:
                        found[others[namespace, inner]] = pid
        return found

    # -- boards ---------------------------------------------------------------------------------

    def _board(
        self,
        name: str,
        about: description.BoardDescription,
        states: Mapping[int, Status],
        world: description.WorldDescription,
    ) -> BoardView:
        members, here = _ranks(about.members), _ranks(about.here)
        cells = self._cells(name, len(here))
        statuses: dict[int, Status] = {}
        waits: dict[int, WaitView] = {}
        for index, rank in enumerate(here):
            number, label = _last(cells, index)
            for _ in range(_LOOKS):
                if label is not None or not number:
                    break
                number, label = _last(self._cells(name, len(here)), index)
            statuses[rank] = states[rank]._replace(rounds=number, label=label)
            wait = cells.read_wait(index)
            if wait.number:
                waits[rank] = wait
        front = min(status.rounds for status in statuses.values())
        if len(here) < len(members):
            number = max(wait.number for wait in waits.values()) if waits else front
            report = self._report(name.removesuffix("-here"), len(here), number)
            come = {r for host in report.come for r in _ranks(world.hosts[host][1])}
            for rank in members:
                if rank not in statuses:
                    # This rank waits for the round: so all have come to the one before.
                    rounds = number if rank in come else max(0, number - 1)
                    label = _label_at(cells, 0, rounds)
                    rounds, label = report.last_seen(rank) or (rounds, label)
                    statuses[rank] = Status(rounds, label, "alive")
        complete = min(status.rounds for status in statuses.values())
        last = _last_barrier(cells, complete)
        return BoardView(tuple(members), statuses, waits, last, str(about.name))

    def _cells(self, name: str, count: int) -> memory.CellReader:
        with self._opened(name) as fd:
            found = memory.read_header(fd)
            if found[0] != memory.BOARD_MAGIC:
                raise _OtherVersion
            size = os.fstat(fd).st_size
            if found[1] != count or not 0 < count * memory.CELLS * memory.BODY_SIZE < size:
                raise ValueError("its cells are not those of its members")
            cells = memory.CellReader(_copy(fd, size), count)
        if cells.size != size:
            raise ValueError("its cells have been cut off")
        return cells

    def _report(self, name: str, count: int, number: int) -> description.HostReport:
        """Return what this host knows of the others that it waits for in this round."""
        # Only such a backend has several hosts.
        host_state = import_module("syncprims.backends.torch.host_state")
        try:
            with self._opened(name + host_state.OF_HOST) as fd:
                if memory.read_header(fd)[0] == host_state.MAGIC:
                    of, report = host_state.read_report(_copy(fd, os.fstat(fd).st_size), count)
                    return report if of == number else description.NO_REPORT
        except FileNotFoundError:
            pass
        return description.NO_REPORT

    # -- files ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, name: str) -> Generator[int]:
        fd = os.open(name, _FILE, dir_fd=self._fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError(f"{name} is no file")
            yield fd
        finally:
            os.close(fd)


class _OtherVersion(ValueError):
    pass


def _explain(error: Exception) -> str:
    if isinstance(error, _OtherVersion):
        return "it is of another version of syncprims: use the command of that installation"
    if isinstance(error, OSError):
        return f"its files cannot be read: {error.strerror}"
    return f"its files are damaged, or of another version of syncprims: {error}"


def _copy(fd: int, size: int) -> bytes:
    data = os.pread(fd, size, 0)
    if len(data) < size:
        raise ValueError("a file has been cut off")
    return data


def _ranks(text: str) -> list[int]:
    """Return the ranks of a description.

    :raises ValueError: if they are absurd.
    """
    numbers = [int(number) for number in re.split("[,-]", text)]
    if numbers != sorted(set(numbers)) or not 0 <= numbers[0] <= numbers[-1] < _MOST_RANKS:
        raise ValueError("the ranks of its description make no sense")
    return parse_ranks(text)


def _last(cells: memory.CellReader, index: int) -> tuple[int, Label | None]:
    """Return how many rounds a member has posted, and the label of the last; None if torn."""
    number = cells.posted(index)
    return number, _label_at(cells, index, number)


def _label_at(cells: memory.CellReader, index: int, number: int) -> Label | None:
    """Return the label of a member's note for a round; None if it is not there, or not whole."""
    word = cells.word_of(number, index)
    if number <= 0 or memory.WORD.unpack(word)[0] != number:
        return None
    body = cells.read_body(number % memory.CELLS, index, word)
    return None if body is None else Label.decode(body[0])


def _last_barrier(cells: memory.CellReader, complete: int) -> Label | None:
    """Return the label of the last barrier with a name, of the rounds that are still there."""
    for number in range(complete, max(0, complete - memory.CELLS), -1):
        label = _label_at(cells, 0, number)
        if label is not None and label.kind == "barrier" and label.name is not None:
            return label
    return None


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208
    except OSError:  # not Linux
        return []


# -- ranks of other hosts ---------------------------------------------------------------------


def add_other_hosts(
    view: WorldView, before: Mapping[int, Any] | None, clocks: dict[int, float]
) -> WorldView:
    """Return a view with what the ranks of other hosts have published at the store, read only.

    `before` is what the look before has read: a rank that has published nothing since gives no sign
    of life, and only its rounds are known. `clocks` keeps how far the clock of each is behind ours.

    :raises BackendUnavailable: if the store does not answer.
    """
    now, states = time.monotonic(), dict(view.states)
    boards = {board.at: board for board in view.boards}
    try:
        others = _read_others(view)
        for rank, about in others.items():
            behind = clocks.setdefault(rank, now - about.now)
            lives = not before or rank not in before or before[rank].now != about.now
            if lives:
                states[rank] = Status(state="alive")
            for ranks, rounds, text, (number, since, for_data), name in about.boards:
                at = tuple(_ranks(ranks)), name
                board = boards.get(at, BoardView(at[0], {}, {}, name=name))
                label = Label.decode(text.encode("latin-1"))
                statuses = {**board.statuses, rank: Status(rounds, label, "alive")}
                wait = WaitView(number, since + behind, for_data)
                waits = {**board.waits, rank: wait} if number and lives else board.waits
                boards[at] = board._replace(statuses=statuses, waits=waits)
    except (TypeError, ValueError) as error:  # they are of another version
        return view._replace(problem=_explain(error))
    whole = [board for board in boards.values() if len(board.statuses) == len(board.members)]
    return view._replace(boards=whole, states=states, others=others)


def _read_others(view: WorldView) -> dict[int, description.RankDescription]:
    # Only such a backend has several hosts.
    stores = import_module("syncprims.backends.torch.store")
    decisions = import_module("syncprims.backends.torch.decisions")
    host, port, prefix, key, _ = view.store
    ranks = [rank for rank in range(view.world_size) if rank not in view.states]
    endpoint = stores.StoreEndpoint(host, port, prefix, _STORE_TIMEOUT)

    def read(store: object) -> list[bytes]:
        return [decisions.read_key(store, f"{key}/{rank}") for rank in ranks]

    link = stores.StoreLink("who", endpoint.connect, await_served=endpoint.await_served)
    try:
        found: list[bytes] = link.ask(read, _STORE_TIMEOUT)
    except stores.StoreGone as error:
        what = f"the store of run {view.run_id} at {endpoint.address} does not answer: {error}"
        raise BackendUnavailable(f"{what}. Without --all-hosts, this host is shown") from error
    finally:
        link.close()
    texts = zip(ranks, found, strict=True)
    return {r: description.RankDescription(*json.loads(text)) for r, text in texts if text}


# -- finding worlds ---------------------------------------------------------------------------


def find_worlds(
    settings: Settings, *, pids: Sequence[int] | None = None, path: str | None = None
) -> tuple[Sequence[WorldReader], list[str]]:
    """Return readers of the worlds of this host, and the directories that may not be read.

    With `pids`, of the worlds that these processes are ranks of. With `path`, of those in this
    directory: of a world, of a run, or what ``SYNCPRIMS_DIR`` names.
    """
    search = _Search()
    if path is None:
        for pid in _processes() if pids is None else pids:
            search.add_worlds_of(pid)
    if pids is None:
        for base in _bases(settings) if path is None else _inside(Path(path)):
            search.add_worlds_below(base)
    return search.readers, sorted(search.refused)


class _Search:
    """The worlds that were found, each of them once."""

    def __init__(self) -> None:
        self.readers: list[WorldReader] = []
        self.refused: set[str] = set()  #: directories that this user may not read
        self._known: set[tuple[int, int]] = set()  # by device and inode

    def add_worlds_of(self, pid: int) -> None:
        """Add the worlds whose directory a process holds open."""
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for number in os.listdir(folder):  # noqa: PTH208 - faster, for hundreds of processes
                with contextlib.suppress(OSError):
                    name = os.readlink(f"{folder}/{number}")  # noqa: PTH115
                    begin = name.rfind("/syncprims-")
                    if begin >= 0 and _WORLD.fullmatch(name, begin):
                        self._add(name, f"{folder}/{number}")

    def add_worlds_below(self, path: Path, levels: int = 2) -> None:
        """Add those at most so many levels below `path`, or that which it is itself."""
        try:
            if _WORLD.search(str(path)) and (path / liveness.FILE).exists():
                self._add(str(path), str(path))
                return
            inside = sorted(path.iterdir())
        except PermissionError:
            self.refused.add(str(path))
            return
        except OSError:
            return
        for inner in inside:
            if _WORLD.search(str(inner)):
                self._add(str(inner), str(inner))
            elif levels > 1 and inner.name.startswith("syncprims-") and not inner.is_symlink():
                self.add_worlds_below(inner, levels - 1)

    def _add(self, name: str, path: str) -> None:
        """Open the directory of a world, unless it is known; another user's only as root."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            self.refused.add(name)
            return
        except OSError:
            return
        status = os.fstat(fd)
        identity = status.st_dev, status.st_ino
        if identity in self._known or os.geteuid() not in (0, status.st_uid):
            os.close(fd)
            return
        self._known.add(identity)
        self.readers.append(WorldReader(name, fd))


def _bases(settings: Settings) -> list[Path]:
    """Return where runs of this host may meet, as far as is known without their processes."""
    found = [private_dir.base_path(settings)]
    with contextlib.suppress(OSError):
        for parent in list_common_places():
            for path in parent.glob("syncprims-*"):
                found += _inside(path)
        found += Path("/run/user").glob("*/syncprims")
    return found


def _inside(path: Path) -> list[Path]:
    """Return where runs may meet if `path` is a launch's scratch directory, with those inside."""
    found = [path, path / "board"]
    with contextlib.suppress(OSError):  # it may end at this moment, or be another user's
        found += path.glob("[0-9]*/board")
        found += path.glob("[0-9]*/syncprims-run-*/[0-9]*/board")
    return found


def launcher_of(path: str) -> int | None:
    """Return the process whose launch a world is a part of; None if it is of none."""
    for scratch in Path(path).parents[3:5]:  # of RESTART/board/RUN/WORLD, maybe one deeper
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((scratch / LOCK).read_text().split()[0])
    return None
