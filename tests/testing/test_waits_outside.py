"""Ranks that wait outside of the library for what another rank does there, as programs do."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import multiprocessing
import os
import queue
import re
import select
import selectors
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock

import syncprims as sp
from syncprims.testing import DeadlockError, StallError, UncontrolledError, explore, run_world


class Place:
    """A folder, and what is closed at the end."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def keep(self, one: Any) -> Any:
        """Return a file, by its number or an object with ``close()``; it is closed at the end."""
        self._stack.callback(os.close, one) if type(one) is int else self._stack.callback(one.close)
        return one


class Way(NamedTuple):
    """Rank 1 gives something once, and the others take it, outside of calls."""

    give: Callable[[], object]
    take: Callable[[], object]
    exact: bool = False  #: it is known, and not guessed, that nobody ever gives it


def event(place: Place) -> Way:
    one = threading.Event()
    return Way(one.set, one.wait, exact=True)


def event_with_limit(place: Place) -> Way:
    one = threading.Event()
    return Way(one.set, lambda: bool(one.wait(60)) or 1 / 0)


def own_condition(place: Place) -> Way:
    given, changed = list[int](), threading.Condition()

    def give() -> None:
        with changed:
            given.append(1)
            changed.notify_all()

    def take() -> None:
        with changed:
            assert changed.wait_for(lambda: given, timeout=60)

    return Way(give, take)


def own_queue(place: Place) -> Way:
    one = queue.Queue[int]()
    return Way(lambda: deque(map(one.put, range(2))), one.get, exact=True)


def queue_with_limit(place: Place) -> Way:
    one = queue.Queue[int]()
    return Way(lambda: deque(map(one.put, range(2))), lambda: one.get(timeout=60))


def simple_queue(place: Place) -> Way:
    one = queue.SimpleQueue[int]()
    return Way(lambda: deque(map(one.put, range(2))), one.get, exact=True)


def semaphore(place: Place) -> Way:
    one = threading.Semaphore(0)
    return Way(lambda: one.release(2), one.acquire, exact=True)


def bare_lock(place: Place) -> Way:
    one = threading.Lock()
    one.acquire()

    def take() -> None:
        with one:
            pass

    return Way(one.release, take, exact=True)


def lock_with_limit(place: Place) -> Way:
    one = threading.Lock()
    one.acquire()

    def take() -> None:
        assert one.acquire(timeout=60)
        one.release()

    return Way(one.release, take)


def future(place: Place) -> Way:
    one = Future[int]()
    return Way(partial(one.set_result, 1), one.result, exact=True)


def task_of_a_pool(place: Place) -> Way:
    given = threading.Event()

    def take() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(given.wait).result()

    return Way(given.set, take, exact=True)


def own_thread(place: Place) -> Way:
    given = threading.Event()

    def take() -> None:
        thread = threading.Thread(target=given.wait)
        thread.start()
        thread.join()

    return Way(given.set, take, exact=True)


def loop_that_another_thread_wakes(place: Place) -> Way:
    given = threading.Event()
    return Way(given.set, lambda: asyncio.run(asyncio.to_thread(given.wait)), exact=True)


def loop_that_polls(place: Place) -> Way:
    given = threading.Event()

    async def poll() -> None:
        while not given.is_set():
            await asyncio.sleep(0.001)

    return Way(given.set, lambda: asyncio.run(poll()))


def polled_file(place: Place) -> Way:
    def take() -> None:
        while not (place.folder / "given").exists():
            time.sleep(0.001)

    return Way((place.folder / "given").touch, take)


def pipe(place: Place) -> Way:
    reader, writer = map(place.keep, os.pipe())
    return Way(lambda: os.write(writer, b"xx"), lambda: os.read(reader, 1))


def named_pipe(place: Place) -> Way:
    path = place.folder / "pipe"
    os.mkfifo(path)
    keep = place.keep(os.open(path, os.O_RDWR))

    return Way(
        lambda: os.write(keep, b"xx"),
        lambda: os.read(place.keep(os.open(path, os.O_RDONLY)), 1),
    )


def socket_pair(place: Place) -> Way:
    one, other = map(place.keep, socket.socketpair())
    return Way(lambda: one.sendall(b"xx"), lambda: other.recv(1))


def connection(place: Place) -> Way:
    server = place.keep(socket.create_server(("127.0.0.1", 0)))

    def give() -> None:
        server.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while True:
                place.keep(server.accept()[0]).sendall(b"x")

    def take() -> None:
        assert place.keep(socket.create_connection(server.getsockname())).recv(1) == b"x"

    return Way(give, take)


def selected_pipe(place: Place) -> Way:
    reader, writer = map(place.keep, os.pipe())
    return Way(lambda: os.write(writer, b"x"), lambda: select.select([reader], [], []))


def selector(place: Place) -> Way:
    reader, writer = map(place.keep, os.pipe())

    def take() -> None:
        with selectors.DefaultSelector() as one:
            one.register(reader, selectors.EVENT_READ)
            one.select(60)

    return Way(lambda: os.write(writer, b"x"), take)


def pipe_of_multiprocessing(place: Place) -> Way:
    reader, writer = map(place.keep, multiprocessing.Pipe(duplex=False))
    items: Any = range(2)
    lock = threading.Lock()

    def take() -> None:
        with lock:
            reader.recv()

    return Way(lambda: [writer.send(item) for item in items], take)


def locked_file(place: Place) -> Way:
    held = place.keep(os.open(place.folder / "lock", os.O_CREAT | os.O_RDWR))
    fcntl.flock(held, fcntl.LOCK_EX)

    def take() -> None:
        mine = place.keep((place.folder / "lock").open())
        fcntl.flock(mine, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_UN)

    return Way(lambda: fcntl.flock(held, fcntl.LOCK_UN), take)


def lock_of_filelock(place: Place) -> Way:
    held = FileLock(place.folder / "lock", thread_local=False, is_singleton=False)
    held.acquire()

    def take() -> None:
        with FileLock(place.folder / "lock", is_singleton=False):
            pass

    return Way(held.release, take)


def locked_database(place: Place) -> Way:
    path = place.folder / "base"
    held = place.keep(sqlite3.connect(path, check_same_thread=False, isolation_level=None))
    held.execute("CREATE TABLE given (n)")
    held.execute("BEGIN EXCLUSIVE")

    def take() -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as mine:
            mine.execute("INSERT INTO given VALUES (1)")
            mine.commit()

    return Way(lambda: held.execute("COMMIT"), take)


def child_process(place: Place) -> Way:
    def take() -> None:
        code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
        subprocess.run([sys.executable, "-c", code, place.folder / "given"], check=True, timeout=60)

    return Way((place.folder / "given").touch, take)


def imported_module(place: Place) -> Way:
    (place.folder / "waits_at_import.py").write_text(
        "import os, time\n"
        "while not os.path.exists(__file__ + '.given'): time.sleep(0.01)\n"
        "for _ in range(20): time.sleep(0.01)\nEND = 1\n"
    )

    def take() -> None:
        assert importlib.import_module("waits_at_import").END

    return Way((place.folder / "waits_at_import.py.given").touch, take)


WAYS = [
    event, event_with_limit, own_condition, own_queue, queue_with_limit, simple_queue, semaphore,
    bare_lock, lock_with_limit, future, task_of_a_pool, own_thread,
    loop_that_another_thread_wakes, loop_that_polls, polled_file, pipe, named_pipe, socket_pair,
    connection, selected_pipe, selector, pipe_of_multiprocessing, locked_file, lock_of_filelock,
    locked_database, child_process, imported_module,
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[str], Place]]:
    """Return a function that returns a new place, from which modules are imported."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> Place:
            (folder := tmp_path / name).mkdir()
            monkeypatch.syspath_prepend(folder)  # pyright: ignore[reportUnknownMemberType]
            sys.modules.pop("waits_at_import", None)
            return Place(folder, stack)

        yield make
        for thread in threading.enumerate():
            if thread.name.startswith(("rank ", "Thread", "asyncio", "ThreadPool")):
                thread.join(60)
    sys.modules.pop("waits_at_import", None)


def program(way: Way, gives: bool) -> int:
    if sp.get_rank() == 0 or (sp.get_rank() == 2 and gives):
        way.take()
    elif gives:
        way.give()
    return sp.all_reduce(sp.get_rank()) + sp.all_reduce(1)


@pytest.mark.parametrize("make", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_ranks_get_what_another_one_gives(
    make: Callable[[Place], Way], seeds: int, place: Callable[[str], Place]
) -> None:
    for seed in range(seeds):
        way = make(place(str(seed)))
        assert run_world(partial(program, way, True), 3, seed=seed) == [6] * 3


@pytest.mark.parametrize("make", WAYS, ids=lambda way: way.__name__)
def test_what_nobody_gives_is_named_with_its_line(
    make: Callable[[Place], Way], place: Callable[[str], Place]
) -> None:
    way = make(place("only"))
    with pytest.raises(DeadlockError if way.exact else StallError) as caught:
        run_world(partial(program, way, False), 3, timeout=60 if way.exact else 1.5)
    assert re.search(
        r"rank 0: (waits outside of the library, at \S*test_waits_outside.py:\d+"
        r"|is importing waits_at_import|is busy|is ready)", str(caught.value)
    )  # fmt: skip
    way.give()  # so that no thread of it is left


def test_a_lock_may_be_held_in_a_pause() -> None:
    """A rank that pauses has lost the turn, and one that needs its lock loses it, too."""
    lock, order = threading.Lock(), list[int]()

    def program() -> None:
        with lock:
            order.append(sp.get_rank())
            time.sleep(0.2)
            order.append(sp.get_rank())
        sp.barrier()

    run_world(program, 3)
    assert [a for a, b in zip(order[::2], order[1::2], strict=True) if a == b] == order[::2]


def test_what_no_seed_decides_is_said() -> None:
    def pause() -> None:
        sp.barrier()
        time.sleep(0.3)
        sp.barrier("after the pause")

    def program() -> None:
        pause()
        assert sp.get_rank() != 1, "a failure"

    with pytest.raises(AssertionError, match="a failure") as caught:
        run_world(program, 2)
    said = r"the order was not decided by the seed: rank . waits outside .*test_waits_outside.py:"
    assert any(re.search(said, note) for note in caught.value.__notes__)
    with pytest.raises(UncontrolledError, match="the order was not decided by the seed"):
        explore(pause, 2, strategy="all")
