"""``torch.distributed`` in the world of a test: its groups meet at the boards of this world.

A program finds what it would find under torchrun, whatever backend it asks for. In a world of
threads, what torch keeps for a process is kept for each rank (`rank_globals`). All other worlds
need no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from syncprims import errors
from syncprims._protocol.call_site import NoteCache
from syncprims._protocol.diagnosis import Snapshot
from syncprims._system.host import free_port
from syncprims._system.locks import locked
from syncprims._world.runtime import get_world
from syncprims._world.world import RunningWorld
from syncprims.c10d import torch_internals
from syncprims.c10d.torch_internals import Opening, dist, serve_groups
from syncprims.interface import Awaited, Board, Label
from syncprims.testing.faults import current_target
from syncprims.testing.orders import Mode

from .as_gloo import as_gloo
from .async_work import changes_at_wait, finishing
from .rank_globals import RankGlobals, check_names, make_fresh_process

# -- the store -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shared(path: Path) -> Generator[dict[Any, Any]]:
    """Return a context with the dictionary in a file; what it is at the end is written.

    No other rank reads or changes it meanwhile.
    """
    with path.open("a+b") as file, locked(file.fileno()):
        file.seek(0)
        before = file.read()
        values: dict[Any, Any] = pickle.loads(before) if before else {}
        yield values
        after = pickle.dumps(values)
        if after != before:
            file.truncate(0)
            file.write(after)
            file.flush()  # while the lock is held: another rank would find an empty file


class _WorldStore(dist.Store):  # type: ignore[misc]
    """A store of one rank in the world of a test; its keys and values are in a file.

    Every call is a point at which another rank may get the turn. A rank that waits for a key waits
    for any of the other ranks. The world sees that as it sees a wait at a board: it ends with an
    error if no rank can ever set the key.
    """

    def __init__(self, path: Path, world: RunningWorld, number: int) -> None:
        """Use the file at `path`; `number` distinguishes the keys from those of earlier stores."""
        super().__init__()
        self.path = path
        self._world = world
        self._number = number

    @contextlib.contextmanager
    def _values(self) -> Generator[dict[str, bytes]]:
        """Return a context with what the keys have; what it is at the end is written."""
        with _shared(self.path) as stores:
            yield stores.setdefault(self._number, {})

    @contextlib.contextmanager
    def _turn(self, mode: Mode, *keys: str) -> Generator[dict[str, bytes]]:
        """Give up the turn, then return the values, of which these keys are read or written."""
        board = self._world.rounds.board
        self._world.background.wait(lambda: True, board.now(), Awaited("a store", [board]))
        self._access(mode, *keys)
        with self._values() as values:
            yield values

    def _access(self, mode: Mode, *keys: str) -> None:
        for key in keys:
            current_target.get().access(("store", self._number, key), mode)
            if mode == "write":
                current_target.get().access(("store", self._number), "post")

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        with self._turn("write", key) as values:
            values[key] = _encode(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once a rank has set it."""
        (value,) = self._await([key], None, "get")
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key has, from 0 on, and return the sum."""
        with self._turn("write", key) as values:
            number = int(values.get(key, b"0")) + amount
            values[key] = str(number).encode()
        return number

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        with self._turn("write", key) as values:
            values[key] = values.get(key, b"") + _encode(value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if the old one is the expected one; return its value then."""
        with self._turn("write", key) as values:
            if values.get(key, b"") == _encode(expected):
                values[key] = _encode(desired)
            return values.get(key, _encode(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys have been set."""
        with self._turn("read", *keys) as values:
            return all(key in values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all these keys have been set."""
        self._await(keys, timeout, "wait")

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was there."""
        with self._turn("write", key) as values:
            return values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys there are."""
        with self._turn("read") as values:
            current_target.get().access(("store", self._number), "read")
            return len(values)

    # torch's C++ code finds these by their names in C++.
    deleteKey, getNumKeys = delete_key, num_keys

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys, once all have been set."""
        return self._await(keys, None, "multi_get")

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the values of these keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return that there are `append`, `multi_get` and `multi_set`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the time limit of other stores: a wait that cannot end is found without one."""

    def _await(self, keys: Sequence[str], timeout: timedelta | None, call: str) -> list[bytes]:
        """Return the values of the keys once all are there.

        :raises PeerLost, PeerFailed: if a rank is lost or has failed, or all others have finished.
        :raises CollectiveMismatch: if all ranks wait for each other.
        :raises torch.distributed.DistStoreError: after `timeout`, as from other stores.
        """
        rounds = self._world.rounds
        label = rounds.note(f"store.{call}", ", ".join(keys)).label
        rank, board = self._world.rank, rounds.board
        begin = board.now()
        found: list[bytes] = []

        def came() -> bool:
            with self._values() as values:
                found[:] = [values[key] for key in keys if key in values]
            if len(found) == len(keys):
                return True
            error = _absence(board, rank, label, board.now() - begin)
            if error is not None and timeout is None:
                board.abort(errors.dump(error))
            return board.verdict() is not None

        with self._turn("read", *keys) as values:
            if all(key in values for key in keys):
                return [values[key] for key in keys]
        seconds = None if timeout is None else timeout.total_seconds()
        until = math.inf if seconds is None else begin + seconds
        self._world.background.wait(came, until, Awaited(str(label), [board]))
        self._access("read", *keys)
        if len(found) == len(keys):
            return found
        verdict = board.verdict()
        if verdict is not None:
            raise errors.load(verdict)
        raise dist.DistStoreError(f"{label} timed out after {seconds:g} s: the keys were not set")


def _absence(board: Board, rank: int, label: Label, waited: float) -> errors.SyncError | None:
    """Return why what `rank` waits for will not come; None if another rank may still set it."""
    seen = {member: board.status(member)._replace(rounds=0) for member in board.members}
    seen[rank] = seen[rank]._replace(rounds=1, label=label)
    states = {status.state for member, status in seen.items() if member != rank}
    if states - {"finished"} and not states & {"lost", "failed"}:
        return None
    return Snapshot(seen, rank, 1, waited, 0).absence()


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# -- a world that serves torch ---------------------------------------------------------------------


def make_torchrun_variables() -> dict[str, str]:
    """Return what torchrun sets for all ranks alike, beside their number."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


class _Rendezvous:
    """The rendezvous of the ranks of a world, for every URL that their program names."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stores: dict[int, list[_WorldStore]] = {}  # torch keeps only the C++ part of one

    def __call__(self, url: str, rank: int, world_size: int) -> tuple[_WorldStore, int, int]:
        """Return the store of this rank, its number, and how many ranks there are.

        :raises ValueError: if the program says other numbers.
        """
        world = get_world()
        for given, number, what in (
            (rank, world.rank, "rank"),
            (world_size, world.world_size, "world_size"),
        ):
            if given not in (-1, number):
                raise ValueError(
                    f"init_process_group({what}={given}): in this world it is {number}"
                )
        stores = self._stores.setdefault(world.rank, [])
        stores.append(_WorldStore(self._path, world, len(stores)))
        return stores[-1], world.rank, world.world_size


class SameMembers:
    """Compares the members of each group between the ranks that make it.

    Groups of other backends meet under their name, which counts the calls of `new_group`. There is
    no round for it: the first rank leaves its list.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._default_groups: dict[int, int] = {}  # how many each rank has made

    def __call__(self, opening: Opening, ours: Callable[[], Any], _: object) -> Any:
        """Compare, and return the group.

        :raises CollectiveMismatch: if another rank has made this group of other ranks.
        """
        if not opening.ranks:  # this may start the world
            self._default_groups[opening.rank] = self._default_groups.get(opening.rank, 0) + 1
            return ours()
        world, ranks = get_world(), opening.ranks
        notes = NoteCache(torch_internals.BETWEEN)
        label = notes.note("new_group", f"of ranks {ranks}").label
        with _shared(self._path) as values:
            place = ("members", self._default_groups.get(world.rank, 0), opening.name)
            theirs, first = values.setdefault(place, (ranks, f"rank {world.rank}: {label}"))
        if theirs != ranks:
            raise errors.CollectiveMismatch(
                f"ranks make unlike groups in the same call of new_group:\n  {first}\n"
                f"  rank {world.rank}: {label}\n"
                f"Every rank must make all groups, also those of other ranks, in the same order.",
                rank=world.rank,
                call=str(label),
            )
        return ours()


def meet_makers(call: str, ranks: Sequence[int] | None, timeout: float | None = None) -> None:
    """Return when these ranks, by default all, have come to the `call` that makes a group.

    `timeout` is in seconds.
    """
    world = get_world()
    rounds = world.open_rounds(ranks or range(world.world_size), call, torch_internals.BETWEEN)
    try:
        rounds.meet(rounds.note(call.partition(" ")[0]), timeout)
    finally:
        world.close_rounds(rounds, lambda: errors.WorldClosed(call))


@contextlib.contextmanager
def _serve(store: Path, replicas: bool) -> Generator[None]:
    """Serve, within the block, every group that this process opens; `store` is a file.

    With `replicas`, compare them at each step.
    """
    comparison: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if replicas:
        from .replicas import ReplicaComparison  # it needs the room of training

        comparison = ReplicaComparison(partial(_shared, store)).at_each_step()
    with (
        torch_internals.replaced_rendezvous(_Rendezvous(store)),
        torch_internals.replaced_init_barrier(meet_makers),
        serve_groups(SameMembers(store)),
        changes_at_wait(),
        as_gloo(),
        comparison,
    ):
        yield


def import_lazy_modules() -> None:
    """Import now what torch imports when a rank needs it, since no time limit runs here.

    DDP and FSDP import `torch._dynamo`, which takes seconds. Default arguments of the other module
    keep the default group of the moment of its import: ranks have none yet.

    :raises BackendUnavailable: if torch, or another package, lacks a name that worlds need.
    """
    check_names()
    before = {*os.environ}
    for name in ("torch.distributed.nn.functional", "torch._dynamo"):
        importlib.import_module(name)
    for name in os.environ.keys() - before:
        del os.environ[name]  # it would be set for the tests, too


class TorchThreads:
    """Serves ``torch.distributed`` in a world of threads."""

    def __init__(self, environs: Sequence[Mapping[str, str]], replicas: bool) -> None:
        import_lazy_modules()
        self._replicas = replicas
        self._globals = RankGlobals(environs)
        #: See there; called with each rank that gets the turn.
        self.enter: Callable[[int | None], None] = self._globals.enter

    @contextlib.contextmanager
    def serve(self) -> Generator[None]:
        """Return a context for the whole process, in which the ranks run."""
        threads = torch.get_num_threads()
        # `torch.get_default_device` of torch 2.6 does not see a `with torch.device(...)`.
        self._device, self._grad = torch.empty(0).device, torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        with (
            tempfile.NamedTemporaryFile() as file,
            _serve(Path(file.name), self._replicas),
            torch_internals.threads_as_processes(),
        ):
            torch.set_num_threads(1)  # as in a process of a test; each new thread inherits it
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                self._globals.enter(None)

    def as_rank(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """Return `fn` as a rank's thread is to call it: with what a forked process inherits."""

        def run() -> Any:
            __tracebackhide__ = True
            with (
                torch.inference_mode(self._inference),
                # Backward passes run in this thread alone, also on devices. The mode of inference
                # sets this, too.
                torch.autograd.set_multithreading_enabled(False),
            ):
                torch.set_grad_enabled(self._grad)
                # Not a `with torch.autocast()`: inner ones would keep the weights that they cast.
                torch.set_autocast_dtype("cpu", self._autocast[0])
                torch.set_autocast_enabled("cpu", self._autocast[1])
                if self._device.type != "cpu":
                    torch.set_default_device(self._device)
                try:
                    return finishing(fn)()
                finally:
                    torch_internals.forget_group_names()

        return run


def serve_in_process(
    rank: int, fn: Callable[[], Any], store: Path, replicas: bool
) -> Callable[[], Any]:
    """Serve ``torch.distributed`` in this process, which is a rank, until its end.

    Return `fn` as this rank is to call it.
    """
    make_fresh_process(rank)
    torch_internals.forget_group_names()
    _serving.enter_context(_serve(store, replicas))
    return finishing(fn)


_serving = contextlib.ExitStack()  # never closed: the process ends before
