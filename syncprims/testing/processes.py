"""Worlds of processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._world.runtime import clean_environ

from .child import STACK_SIGNAL, Orders, load_once
from .errorbox import unpack
from .faults import Kill, Stop
from .journal import Journal, deadlock, missing
from .output import told_apart
from .report import users_lines
from .runs import Outcome, Run
from .starting import default_start, start

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .faults import Fault
    from .output import Sink
    from .starting import Start, Started

_LOOK_EVERY = 0.01  # seconds
_GRACE = 5.0  # seconds for the others to meet their own error once one has failed
_FREE_PORT_FOR = ("torch", "gloo", "nccl")


class ProcessWorld:
    """One run of `fn` in so many processes."""

    def __init__(
        self,
        fn: Callable[[], Any],
        ranks: int,
        backend: str,
        faults: list[Fault],
        sink: Sink | None,
        how: Start | None = None,
    ) -> None:
        self._fn = fn
        self._ranks = ranks
        self._backend = backend
        self._faults = faults
        self._sink = sink
        self._how: Start = how or default_start()
        self._outcomes = [Outcome(rank) for rank in range(ranks)]
        self._run = Run(self._outcomes)
        self._codes: dict[int, int] = {}
        self._failed_at: float | None = None

    def run(self, timeout: float | None) -> Run:
        """Return how it went; after so many seconds it is given up."""
        with _scratch() as folder, told_apart(self._sink):
            orders = Orders(folder, self._ranks, self._faults, self._environ(folder), os.getpid())
            self._orders = orders
            self._journals = {r: Journal(orders.path("journal", r)) for r in range(self._ranks)}
            (folder / "board").mkdir(mode=0o700)
            if self._how == "fork":
                load_once(self._backend)
            started = start(self._how, orders, self._fn)
            try:
                self._watch(started, timeout)
            finally:
                self._end_all(started)
                self._say()
            self._conclude()
        return self._run

    def _environ(self, folder: Path) -> dict[str, str]:
        environ = {
            **clean_environ(),
            "SYNCPRIMS_BACKEND": self._backend,
            "SYNCPRIMS_RUN_ID": folder.name,
            "SYNCPRIMS_DIR": str(folder / "board"),
        }
        environ.setdefault("OMP_NUM_THREADS", "1")
        if self._backend in _FREE_PORT_FOR:
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return environ

    # -- while it runs ------------------------------------------------------------------------

    def _watch(self, started: Started, timeout: float | None) -> None:
        """Return when all ranks have ended, or cannot, or may not take longer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        quiet = 0  # looks in a row at which nobody had done anything
        while len(self._codes) < self._ranks:
            self._take_ends(started.ended(_LOOK_EVERY))
            changed = [journal.read() for journal in self._journals.values()]
            quiet = 0 if any(changed) else quiet + 1
            if quiet and self._is_stuck():
                return
            now = time.monotonic()
            if deadline is not None and now > deadline:
                self._give_up(started, f"the world still runs after {timeout:g} s")
                return
            if self._failed_at is not None and now > self._failed_at + _GRACE:
                self._run.stacks = self._stacks(started)
                return  # the others do not come to hear of it

    def _take_ends(self, codes: dict[int, int]) -> None:
        self._codes |= codes
        for rank in codes:
            self._read_report(rank)
            outcome = self._outcomes[rank]
            if outcome.error is not None and self._failed_at is None:
                self._failed_at = time.monotonic()

    def _is_stuck(self) -> bool:
        """Look for a deadlock: tell the ranks of one; return True if they cannot even be told.

        What is written has stood for two looks, so that it all stood at one time.
        """
        living = {r: j for r, j in self._journals.items() if r not in self._codes}
        stopped = [r for r, journal in living.items() if self._is_stopped(journal)]
        waiting = {r: j for r, j in living.items() if r not in stopped}
        if not waiting or any(j.waits is None or j.bounded for j in waiting.values()):
            return False
        everybody = self._journals
        if any(not missing(journal, everybody) for journal in waiting.values()):
            return False  # its round is complete, and it is about to go on
        if any(missing(journal, everybody) - living.keys() for journal in waiting.values()):
            return False  # for somebody who has ended: it is about to hear of that
        if self._orders.verdict.exists():
            return False  # they have been told
        verdict = deadlock(waiting)
        if verdict is not None:
            self._run.stuck = True
            new = self._orders.folder / "new-verdict"
            new.write_bytes(verdict)
            new.rename(self._orders.verdict)
            return False
        if stopped:
            self._run.gave_up = (
                f"the others wait for ranks {stopped}, which are stopped but not dead: without a "
                f"timeout they wait for as long as that lasts"
            )
        return bool(stopped)

    def _is_stopped(self, journal: Journal) -> bool:
        return any(isinstance(self._faults[number], Stop) for number in journal.struck)

    def _give_up(self, started: Started, why: str) -> None:
        self._run.stacks = self._stacks(started)
        self._run.gave_up = (
            f"{why} of real time: a rank is busy outside of the library's calls, or there is much "
            f"to do. See where the ranks are, or allow more: timeout="
        )

    def _stacks(self, started: Started) -> str:
        """Return the stacks of all ranks that still run, as they tell them."""
        for pid in started.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + 0.5
        files = {rank: self._orders.path("stack", rank) for rank in started.pids}
        while time.monotonic() < deadline and not all(
            file.exists() and file.stat().st_size for file in files.values()
        ):
            self._take_ends(started.ended(_LOOK_EVERY))
        texts = {rank: file.read_text() for rank, file in files.items() if file.exists()}
        return "\n".join(
            f"stack of rank {rank}:\n" + "\n".join(users_lines(text.splitlines()[:0:-1]))
            for rank, text in texts.items()
            if text
        )

    # -- when it is over ------------------------------------------------------------------------

    def _end_all(self, started: Started) -> None:
        """End what still runs, and let go of it."""
        for pid in started.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._killed = set(started.pids)
        while started.pids:
            self._take_ends(started.ended(_LOOK_EVERY))
        started.close()

    def _say(self) -> None:
        """Pass on what the ranks have printed."""
        if self._sink is None:
            return
        for rank in range(self._ranks):
            for stream in ("stdout", "stderr"):
                path = self._orders.path(stream, rank)
                text = path.read_text(errors="backslashreplace") if path.exists() else ""
                if text:
                    self._sink.write(rank, stream, text)

    def _read_report(self, rank: int) -> None:
        path = self._orders.path("report", rank)
        if not path.exists():
            return
        facts = pickle.loads(path.read_bytes())
        outcome = self._outcomes[rank]
        outcome.error = unpack(facts["error"], facts["text"])
        outcome.end = "returned" if outcome.error is None else "raised"
        outcome.consequence, outcome.torn = facts["consequence"], facts["torn"]
        outcome.buried = facts["buried"]
        outcome.result = pickle.loads(facts["result"])
        outcome.waited = facts["waits"]

    def _conclude(self) -> None:
        for outcome, journal in zip(self._outcomes, self._journals.values(), strict=True):
            journal.read()
            outcome.calls = journal.calls
            outcome.struck = [self._faults[number] for number in journal.struck]
            outcome.waits = journal.waits
            if outcome.waited:
                outcome.waits = outcome.last
            if outcome.end != "left":
                continue
            code = self._codes.get(outcome.rank)
            if any(isinstance(fault, Stop) for fault in outcome.struck):
                outcome.end = "stopped"
            elif any(isinstance(fault, Kill) for fault in outcome.struck):
                outcome.end = "killed"
            elif outcome.rank not in self._killed:
                outcome.end, outcome.detail = "died", _describe(code)


@contextlib.contextmanager
def _scratch() -> Generator[Path]:
    """Make a private directory, in memory where there is some; it goes whatever the ranks did."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="syncprims-test-", dir=memory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _describe(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
