"""Measure what the control plane costs between hosts: the constants of the simulation.

    python bench/constants.py [--write]

The time of a store is the processor time of the process that serves it, counted by the kernel. So
other programs on the machine hardly affect it. The clients run in separate processes with several
connections each. `--write` writes the figures to constants.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import uuid
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hosts
import torch.distributed

import syncprims as sp
from syncprims.interface import Label, Note

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Request = Callable[[Any, str, int], object]

dist: Any = torch.distributed
decisions: Any = import_module("syncprims.backends.torch.decisions")
store_module: Any = import_module("syncprims.backends.torch.store")

CONSTANTS = Path(__file__).with_name("constants.json")
CLIENTS, CONNECTIONS = 4, (1, 8)  #: processes, and connections per process
COUNT = 1600  #: requests in all
MEASURED_HOSTS = (2, 3, 4, 6, 8)  #: each has one rank
ROUNDS = 200
NOTE = Note(Label("barrier", "", None, None, "train.py:12"))

_VALUE = b"x" * 100
_BIG = 1 << 20


def _contribute(store: Any, key: str, _: int) -> None:
    store.append(f"{key}/notes", _VALUE)
    store.add(f"{key}/count", 1)


#: The requests. Each connection uses its own key; the last argument counts its requests.
REQUESTS: dict[str, Request] = {
    "contribute": lambda store, key, i: _contribute(store, f"{key}/{i}", i),
    "get": lambda store, key, _: store.get(key),
    "check": lambda store, key, _: store.check([key]),
    "add": lambda store, key, _: store.add(f"{key}/beat", 1),
    "compare_set": lambda store, key, i: store.compare_set(f"{key}/decision/{i}", "", _VALUE),
    "delete": lambda store, key, i: store.delete_key(f"{key}/decision/{i}"),
    "get of 1 MB": lambda store, key, _: store.get(f"{key}/big"),
}


@contextlib.contextmanager
def served() -> Generator[tuple[int, int]]:
    """Serve a store in a separate process; yield its port and pid."""
    queue: Any = multiprocessing.SimpleQueue()
    leash, end = os.pipe()

    def serve() -> None:
        os.close(end)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        queue.put(store.port)
        os.read(leash, 1)  # until the parent closes the pipe or ends
        os._exit(0)

    process = multiprocessing.Process(target=serve)
    process.start()
    os.close(leash)
    try:
        yield queue.get(), process.pid or 0
    finally:
        os.close(end)
        process.join()


def processor_time(pid: int) -> float:
    """Return the processor time of all threads of a process, in microseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


def _connect(port: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore("bench", store)


def ask(port: int, pid: int, kind: str, connections: int) -> dict[str, float]:
    """Return the microseconds that one request costs the store and a client."""
    clients = 1 if connections == 1 else CLIENTS
    total = COUNT // 40 if "MB" in kind else COUNT
    each = max(1, total // (clients * connections))
    start, stop = (multiprocessing.Barrier(clients + 1) for _ in range(2))
    queue: Any = multiprocessing.SimpleQueue()

    def client(number: int) -> None:
        stores = [_connect(port) for _ in range(connections)]
        keys = [f"{number}/{index}" for index in range(connections)]
        for store, key in zip(stores, keys, strict=True):
            store.set(key, _VALUE)
            if "MB" in kind:
                store.set(f"{key}/big", b"x" * _BIG)

        def work(store: Any, key: str) -> None:
            for i in range(each):
                REQUESTS[kind](store, key, i)

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(stores, keys, strict=True)
        ]
        start.wait()
        begin, before = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        figures = (time.perf_counter() - begin, time.process_time() - before)
        stop.wait()
        queue.put(figures)

    processes = [multiprocessing.Process(target=client, args=(n,)) for n in range(clients)]
    for process in processes:
        process.start()
    start.wait()
    before, begin = processor_time(pid), time.perf_counter()
    stop.wait()
    spent, elapsed = processor_time(pid) - before, time.perf_counter() - begin
    seen = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    count = each * clients * connections
    return {
        "server": spent / count,
        "client": sum(cpu for _, cpu in seen) / count * 1e6,
        "round trip": statistics.median(wall for wall, _ in seen) / each * 1e6,
        "per second": count / elapsed,
    }


def wake(port: int, pid: int, waiters: int = 16, rounds: int = 40) -> float:
    """Return the store's microseconds for a `get` that has to wait, including the answer."""
    stores = [_connect(port) for _ in range(waiters + 1)]
    ready = threading.Barrier(waiters + 1)

    def wait(store: Any) -> None:
        for i in range(rounds):
            ready.wait()
            store.get(f"awaited/{i}")

    threads = [threading.Thread(target=wait, args=(store,)) for store in stores[1:]]
    for thread in threads:
        thread.start()
    before = processor_time(pid)
    for i in range(rounds):
        ready.wait()
        time.sleep(0.01)  # nearly all wait by then; the others cost less, as in a round
        stores[0].compare_set(f"awaited/{i}", "", _VALUE)
    for thread in threads:
        thread.join()
    return (processor_time(pid) - before) / (rounds * waiters)


def rounds(hosts_: int) -> tuple[list[float], float]:
    """Return the microseconds of each barrier of one-rank hosts, and a host's processor time.

    The barriers run in a tight loop, after a warm-up of a tenth as many.
    """
    queue: Any = multiprocessing.SimpleQueue()
    run_id = uuid.uuid4().hex

    def rank(number: int, port: int, base: str) -> None:
        os.environ.update(hosts.variables(number, hosts_, hosts_, port, base, run_id))
        with sp.init():
            for _ in range(ROUNDS // 10):
                sp.barrier()
            times: list[float] = []
            before = time.process_time()
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                sp.barrier()
                times.append((time.perf_counter() - begin) * 1e6)
            queue.put((number, times, (time.process_time() - before) / ROUNDS * 1e6))

    with served() as (port, _), tempfile.TemporaryDirectory() as base:
        processes = [
            multiprocessing.Process(target=rank, args=(number, port, base))
            for number in range(hosts_)
        ]
        for process in processes:
            process.start()
        seen = sorted(queue.get() for _ in processes)
        for process in processes:
            process.join()
    return seen[0][1], statistics.fmean(processor for _, _, processor in seen)


def handoff(count: int = 2000) -> float:
    """Return the microseconds of processor time to have a link's thread do nothing, one way."""
    link = store_module.StoreLink("bench", lambda: None)
    link.ask(lambda _: None, 10.0)
    before = time.process_time()
    for _ in range(count):
        link.ask(lambda _: None, 10.0)
    spent = time.process_time() - before
    link.close()
    return spent / count / 2 * 1e6


def reading(count: int = 500, ranks: int = 8) -> dict[str, float]:
    """Return the microseconds to make a decision, per host, and to read one, per member."""

    class Store:
        def compare_set(self, _key: str, _old: str, new: bytes) -> bytes:
            return new

        def delete_key(self, _key: str) -> bool:
            return True

    board = decisions.Decisions(
        "bench", {h: range(h * ranks, (h + 1) * ranks) for h in range(count)}
    )
    piece = decisions.encode_notes([NOTE] * ranks)
    contributed = dict.fromkeys(range(count), piece)
    members = range(count * ranks)
    made, read = [], []
    for _ in range(9):
        begin = time.process_time()
        decision = board.complete(Store(), 20, contributed)
        made.append(time.process_time() - begin)
        begin = time.process_time()
        notes = decisions.decode_notes(decision[1:], NOTE)
        dict(zip(members, [note.label for note in notes], strict=True))
        all(note is NOTE for note in notes)
        read.append(time.process_time() - begin)
    return {
        "piece": statistics.median(made) / count * 1e6,
        "member": statistics.median(read) / len(members) * 1e6,
    }


def costs(runs: int) -> tuple[dict[str, Any], list[str]]:
    """Return all constants except the one of a host, and the table of the measurements."""
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    wakes: list[float] = []
    for _ in range(runs):
        with served() as (port, pid):
            for kind in REQUESTS:
                for connections in CONNECTIONS:
                    seen.setdefault((kind, connections), []).append(
                        ask(port, pid, kind, connections)
                    )
            wakes.append(wake(port, pid))

    def median(kind: str, connections: int, what: str) -> float:
        return statistics.median(run[what] for run in seen[kind, connections])

    lines = [
        "| request | connections | a second | the store, us | a client, us | there and back, us |",
        "|---|---|---|---|---|---|",
    ]
    for kind, connections in seen:
        number = connections if connections == 1 else connections * CLIENTS
        cells = [median(kind, connections, w) for w in ("server", "client", "round trip")]
        rate = median(kind, connections, "per second")
        shown = " | ".join(f"{cell:.1f}" for cell in cells)
        lines.append(f"| {kind} | {number} | {rate:.0f} | {shown} |")
    many = CONNECTIONS[-1]
    server = {kind: round(median(kind, many, "server"), 2) for kind in REQUESTS if "MB" not in kind}
    server["wait"] = server["read"] = round(server["get"] / 2, 2)
    server["wake"] = round(max(0.0, statistics.median(wakes) - server["get"]), 2)
    per_kb = max(0.0, median("get of 1 MB", many, "server") - server["get"]) / (_BIG / 1024)
    # An idle round trip, minus the work on both sides.
    idle = {what: median("add", 1, what) for what in ("round trip", "server", "client")}
    link = max(0.0, idle["round trip"] - idle["server"] - idle["client"]) / 2
    return {
        "server": server,
        "server_per_kb": round(per_kb, 4),
        "client": round(median("add", 1, "client"), 2),
        "handoff": round(statistics.median(handoff() for _ in range(runs)), 2),
        **{name: round(figure, 4) for name, figure in reading().items()},
        "note": len(NOTE.encode()) + 4,
        "link": round(link, 2),
    }, lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the constants of the simulation.")
    parser.add_argument("--write", action="store_true", help="also write constants.json")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    multiprocessing.set_start_method("fork")
    seen: dict[int, list[float]] = {}
    own: list[float] = []
    for _ in range(options.runs):  # every size in each run, so that a slow minute affects all sizes
        for count in MEASURED_HOSTS:
            times, processor = rounds(count)
            seen.setdefault(count, []).append(statistics.median(times))
            own.append(processor)
    measured, lines = costs(options.runs)
    measured["host"] = round(statistics.median(own), 1)
    text = json.dumps(
        {
            "processors": os.cpu_count(),
            "costs": measured,
            "rounds": {
                str(count): {
                    "median": round(statistics.median(medians), 1),
                    "runs": [round(median, 1) for median in sorted(medians)],
                }
                for count, medians in seen.items()
            },
        },
        indent=2,
    )
    print("\n".join(lines))
    print(text)
    if options.write:
        CONSTANTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
