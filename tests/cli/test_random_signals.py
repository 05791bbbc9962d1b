"""Signals at random moments: the save is written, or the exit code and the text say why not.

The ranks have pools, workers, threads and subprocesses. Nobody hangs, and nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from support.launches import HEAD, await_condition, command
from support.rank_environment import PATIENCE, clean_environ

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RANKS = 2

#: What a rank has: how it is made, and how each step uses it.
PARTS = {
    "pool": ("pool = stack.enter_context(context.Pool(1))", "assert pool.apply(abs, [-1]) == 1"),
    "executor": (
        (
            "ignore = signal.SIGNUM, signal.SIG_IGN\n"
            "    workers = futures.ProcessPoolExecutor(1, context, signal.signal, ignore)\n"
            "    stack.enter_context(workers)"
        ),
        "assert workers.submit(abs, -1).result() == 1",
    ),
    "loader": (
        (
            "from torch.utils.data import DataLoader\n"
            "    from syncprims.training import prepare_data_loader\n"
            "    batches = iter(prepare_data_loader(DataLoader(range(9999), 2, num_workers=1)))"
        ),
        "next(batches)",
    ),
    "thread": (
        (
            "end = threading.Event()\n"
            "    threading.Thread(target=end.wait).start()\n"
            "    stack.callback(end.set)"
        ),
        "",
    ),
    "subprocess": (
        (
            "child = stack.enter_context(subprocess.Popen(['sleep', '999']))\n"
            "    stack.callback(child.terminate)"
        ),
        "",
    ),
    "atexit": ("atexit.register(time.sleep, 0.1)", ""),
}

SCRIPT = """
import atexit, contextlib, multiprocessing, threading
import concurrent.futures as futures
from pathlib import Path
context = multiprocessing.get_context("fork")
rank, stop = get_rank(), Trigger("stop")
stop.set_on_signal(HANDLED)
with contextlib.ExitStack() as stack:
    MAKE
    barrier()
    for step in range(4000):
        USE
        if step == AT:
            Path(f"at-{rank}").write_text(str(os.getpid()))
        if stop.check():
            Path(f"saved-{rank}").touch()
            break
"""


class Case(NamedTuple):
    """A job, and a signal to it."""

    way: str  #: how the ranks are started
    parts: tuple[str, ...]
    signum: signal.Signals
    target: str
    handled: bool
    step: int

    @property
    def is_possible(self) -> bool:
        """Whether the pages promise something about it."""
        if self.signum == signal.SIGKILL and self.handled:
            return False
        if self.way != "run" and self.target == "launcher":
            # The agent of torchrun signals the groups of its ranks.
            is_passed_on = self.way == "torchrun" and self.signum == signal.SIGTERM
            return is_passed_on and self.handled and "pool" not in self.parts
        # A plain pool does not survive a signal to every process: the page says what does.
        return (self.way == "run" or self.handled) and not (
            "pool" in self.parts and self.target == "all"
        )


def draw(seed: int, ways: list[str], parts: list[str]) -> Case:
    rng = random.Random(seed)
    signals = [signal.SIGTERM] * 3 + [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL]
    while True:
        chosen = tuple(sorted(rng.sample(parts, rng.randint(0, 3))))
        target = rng.choice(["launcher", "one", "all"])
        case = Case(rng.choice(ways), chosen, rng.choice(signals), target, rng.random() < 0.7, 0)
        if case.is_possible:
            return case._replace(step=rng.randint(0, 30))


def processes_of(mark: str) -> list[int]:
    """Return the processes that have this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def start(case: Case, script: Path, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    lines = [command("-n", str(RANKS), str(script))]
    variables = [environ]
    if case.way == "torchrun":
        agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        lines = [[*agent, "--nproc-per-node", str(RANKS), str(script)]]
    elif case.way == "by hand":
        lines = [[sys.executable, str(script)]] * RANKS
        own = {
            "SYNCPRIMS_BACKEND": "file",
            "WORLD_SIZE": str(RANKS),
            "SYNCPRIMS_RUN_ID": environ["MARK"],
        }
        variables = [{**environ, **own, "RANK": str(rank)} for rank in range(RANKS)]
    return [
        subprocess.Popen(line, env=env, cwd=script.parent, stderr=subprocess.PIPE)
        for line, env in zip(lines, variables, strict=True)
    ]


def try_one(case: Case, folder: Path) -> None:
    """Run a job, signal it, and check how it ends."""
    script = folder / "script.py"
    make = "\n    ".join(PARTS[part][0] for part in case.parts) or "pass"
    use = "\n        ".join(PARTS[part][1] or "pass" for part in case.parts) or "time.sleep(0.001)"
    handled = case.signum if case.handled else signal.SIGUSR2
    source = SCRIPT.replace("HANDLED", f"signal.{handled.name}").replace("AT", str(case.step))
    source = source.replace("MAKE", make.replace("SIGNUM", handled.name)).replace("USE", use)
    script.write_text(HEAD + source)
    mark = uuid.uuid4().hex
    started = start(case, script, {**clean_environ(), "OMP_NUM_THREADS": "1", "MARK": mark})
    at = [folder / f"at-{rank}" for rank in range(RANKS)]
    try:
        ended: list[int] = []
        while not (ended or all(path.exists() and path.read_text() for path in at)):
            ended += [one.pid for one in started if one.poll() is not None]
            time.sleep(0.001)
        assert not ended, (case, started[0].communicate()[1].decode())
        targets = [started[0].pid] if case.target == "launcher" else processes_of(mark)
        for pid in [int(at[-1].read_text())] if case.target == "one" else targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, case.signum)
        said = b"".join(one.communicate(timeout=PATIENCE)[1] for one in started).decode()
    finally:
        for one in started:
            one.kill()
    await_condition(lambda: not processes_of(mark), f"{case}: a process is left")
    codes, number = [one.returncode for one in started], int(case.signum)
    saved = [(folder / f"saved-{rank}").exists() for rank in range(RANKS)]
    assert saved == [case.handled] * RANKS, (case, codes, said)
    if case.way != "run":
        assert case.handled
        return  # the codes are those of torchrun, and of the ranks
    told, code = signal.Signals(number).name in said, 128 + number
    if case.handled:
        code = 0 if case.target == "one" or number == signal.SIGUSR1 else code
        code = 75 if number == signal.SIGTERM else code
    elif number == signal.SIGKILL and case.target != "one":
        code, told = -number, True
    elif number == signal.SIGINT and case.target == "all" and codes == [1]:
        code = 1  # the second one, of the launcher, has interrupted the end of Python
    assert codes == [code], (case, said)
    assert told or case.handled, (case, said)


@pytest.mark.parametrize("seed", range(6))
def test_a_signal_at_a_random_moment(seed: int, tmp_path: Path) -> None:
    try_one(draw(seed, ["run", "run", "by hand"], sorted({*PARTS} - {"loader"})), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 250))
def test_signals_at_random_moments(seed: int, tmp_path: Path) -> None:
    try_one(draw(seed, ["run", "run", "by hand", "torchrun"], sorted(PARTS)), tmp_path)
