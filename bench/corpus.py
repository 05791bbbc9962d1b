"""Run the fifty public rank bugs under five tools, and write docs/bugs.md from what they say.

Names of bugs or of tools as arguments run only these; -v prints what the ranks said.
"""

# ruff: noqa: D101, D102, E402
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "corpus"))

import torch
import torch._dynamo  # DDP and optimizers import it late, which takes seconds
import torch.distributed as dist
from accelerate import PartialState, utils
from bugs import BUGS, Bug, found, report

from syncprims.testing import run_world

WAIT = 10  # seconds: the timeout of their calls, which is half an hour by default
BOUND = 30  # seconds: for a whole run
RESULTS = ROOT / "bench" / "corpus.json"


class Tool:
    """``torch.distributed``, with what a tool replaces."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def barrier(self, group: Any = None) -> None:
        dist.barrier(group)


class Monitored(Tool):
    def barrier(self, group: Any = None) -> None:
        dist.monitored_barrier(group, timedelta(seconds=WAIT), wait_all_ranks=True)


class Accelerate(Tool):
    def __init__(self) -> None:
        assert PartialState(cpu=True).debug

    def barrier(self, group: Any = None) -> None:
        dist.barrier(group) if group else PartialState().wait_for_everyone()

    def all_reduce(self, tensor: Any, op: Any = None, **more: Any) -> Any:
        if op or more:
            return dist.all_reduce(tensor, op or dist.ReduceOp.SUM, **more)
        return tensor.copy_(utils.reduce(tensor, "sum"))

    def broadcast(self, tensor: Any, src: int, group: Any = None) -> None:
        dist.broadcast(tensor, src, group) if group else utils.broadcast(tensor, src)

    def all_gather(self, every: list[Any], tensor: Any) -> None:
        every[:] = utils.gather(tensor).chunk(len(every))

    def all_gather_object(self, every: list[Any], value: Any) -> None:
        every[:] = utils.gather_object([value])


THEIRS = {"gloo": Tool, "detail": Tool, "monitored": Monitored, "accelerate": Accelerate}
ENVIRON = {
    "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "accelerate": {"ACCELERATE_DEBUG_MODE": "1"},
}
TOOLS = ["ours", *THEIRS]


class Case:
    """One bug under one tool, in forks of this process, which has one thread only."""

    def __init__(self, bug: type[Bug], tool: str) -> None:
        self.bug, self.tool = bug, tool
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "shared").mkdir()
        self.codes: list[int] = []
        self.first = BOUND + 1.0  #: when the first rank failed
        self.begin = time.monotonic()
        self.pids = {self._fork(rank) for rank in range(1 if tool == "ours" else bug.ranks)}

    def _fork(self, rank: int) -> int:
        if pid := os.fork():
            return pid
        code, said = 1, (self.folder / f"said.{rank}").open("w")
        os.dup2(said.fileno(), 2)
        try:
            code = self._run_ours() if self.tool == "ours" else self._run_theirs(rank)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _run_ours(self) -> int:
        error = found(self.bug, self.folder / "shared")
        return 0 if error is None else 2 if report(self.bug, error) else 3

    def _run_theirs(self, rank: int) -> int:
        world_size = self.bug.ranks
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # Accelerate looks for them
        os.environ |= ENVIRON.get(self.tool, {})
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", f"file://{self.folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=WAIT),
        )  # fmt: skip
        tool = vars(sys.modules[self.bug.__module__])["dist"] = THEIRS[self.tool]()
        (self.folder / "started").touch()
        self.bug.bug(rank, self.folder / "shared")
        tool.barrier()
        dist.destroy_process_group()
        return 0

    def is_over(self) -> bool:
        """Look at the ranks; end those that have reached the bound."""
        late = time.monotonic() > self.begin + BOUND
        for pid in [*self.pids]:
            if late:
                os.kill(pid, signal.SIGKILL)
            if (ended := os.waitpid(pid, 0 if late else os.WNOHANG))[0]:
                self.pids.discard(pid)
                self.codes.append(os.waitstatus_to_exitcode(ended[1]))
                if self.codes[-1]:
                    self.first = min(self.first, time.monotonic() - self.begin)
        return not self.pids

    def outcome(self) -> str:
        """Return what became of the bug."""
        said = [path.read_text() for path in sorted(self.folder.glob("said.*"))]
        if self.tool != "ours" and not (self.folder / "started").exists():
            raise RuntimeError("\n".join([f"{self.tool} did not start:", *said]))
        shutil.rmtree(self.folder)
        if "-v" in sys.argv:
            print(f"== {self.bug.__name__} {self.tool} {self.codes} {self.first:.1f} s", *said)
        if -signal.SIGSEGV in self.codes:
            return "?"
        if not any(self.codes):
            return "silent"
        if self.tool == "ours":
            return "named" if self.codes == [3] else "error"
        if is_named(self.bug, said):
            return "named"
        return "error" if self.first < WAIT else "hang"


def run_all(cases: list[tuple[type[Bug], str]]) -> dict[tuple[str, str], str]:
    """Return the outcome of each case; a few run at once."""
    results, running = {}, list[Case]()
    while cases or running:
        while cases and len(running) < 3:
            running.append(Case(*cases.pop()))
        time.sleep(0.02)
        for case in [case for case in running if case.is_over()]:
            running.remove(case)
            results[case.bug.__name__, case.tool] = case.outcome()
    return results


def is_named(bug: type[Bug], said: list[str]) -> bool:
    """Return whether a text names both the rank and a line of the bug.

    The traceback of the rank itself counts only if its exception is the program's own.
    """
    places = [f'{bug.kind()}.py", line {line}' for line in bug.lines()]
    for rank, text in enumerate(said):
        if not any(place in text for place in places):
            continue
        ends = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exit|Interrupt))\b", text, re.MULTILINE)
        own = ends and not re.match(r"RuntimeError|Dist\w*Error", ends[-1])
        if (rank == bug.rank and own) or re.search(
            rf"\b(?:ranks?|process):?\s+\[?(?:\d+, ?)*{bug.rank}\b", text, re.I
        ):
            return True
    return False


PAGE = """\
# Fifty rank bugs

People reported these bugs in public. Each was rebuilt in a few lines that call `torch.distributed`,
[with a twin without the bug](../tests/corpus/test_corpus.py). A test world of threads names
{named} of {all}, and so does one of processes. All twins pass. Programs of the last kind make the
right calls: there, the test has one line more, which compares weights, samples or a number.

The others ran on Gloo (torch {torch}), in processes: as it is; with
`TORCH_DISTRIBUTED_DEBUG=DETAIL`; with `monitored_barrier` for each barrier; with the functions of
Accelerate {accelerate} and `ACCELERATE_DEBUG_MODE=1`. Their timeout was {wait} s, in place
of half an hour. Where DDP crashed with DETAIL in a forked process, there is a *?*.

A bug is *named* if a text has its rank and a line of it, at once or after the timeout. Otherwise a
rank raises an *error*, ranks *hang* until the timeout, or the program ends in *silence*. A race
ends in one of several ways.

|what users saw|test world|Gloo|DETAIL|monitored|Accelerate|
|---|---|---|---|---|---|
{rows}
|**named, of {all}**|{counts}|
"""


def write_page(results: dict[str, dict[str, str]]) -> None:
    """Write docs/bugs.md."""
    rows, kind = [], ""
    for bug in BUGS:
        if kind != (kind := bug.kind()):
            title = (sys.modules[bug.__module__].__doc__ or "").splitlines()[0].rstrip(".")
            rows.append(f"|**{title}**||||||")
        link = f"[{bug.source}](https://github.com/{bug.source.replace('#', '/issues/')})"
        cells = "|".join(results[bug.__name__][tool] for tool in TOOLS)
        rows.append(f"|{(bug.__doc__ or '').rstrip('.')}: {link}|{cells}|")
    counts = [sum(results[bug.__name__][tool] == "named" for bug in BUGS) for tool in TOOLS]
    page = PAGE.format(
        named=counts[0], all=len(BUGS), wait=WAIT, torch=torch.__version__.partition("+")[0],
        accelerate=version("accelerate"), rows="\n".join(rows),
        counts="|".join(f"**{count}**" for count in counts),
    )  # fmt: skip
    (ROOT / "docs" / "bugs.md").write_text(page)


def main() -> None:
    torch.set_num_threads(1)
    asked = {*sys.argv[1:]} - {"-v"}
    bugs = [bug for bug in BUGS if bug.__name__ in asked] or BUGS
    tools = [tool for tool in TOOLS if tool in asked] or TOOLS
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    new = run_all([(bug, tool) for bug in bugs for tool in tools if tool != "ours"])
    if "ours" in tools:
        run_world(dist.init_process_group, 2, torch=True)  # imports what is used below, once
        new |= run_all([(bug, "ours") for bug in bugs])
    for (bug, tool), outcome in new.items():
        results.setdefault(bug, {})[tool] = outcome
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    write_page(results)


if __name__ == "__main__":
    main()
