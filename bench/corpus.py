"""Run the rank bugs of tests/corpus under each tool, and write docs/bugs.md from what they say.

Names of bugs or tools as arguments, or `classes`, run only these: after a change of the library,
`threads processes`. bench/corpus.json keeps what the others said. -v prints what the ranks said.
"""

# ruff: noqa: D101, D102, E402
from __future__ import annotations

import faulthandler
import json
import os
import pickle
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
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
from bugs import BUGS, CHECKED, FIFTY, Bug, is_named, outcome
from bugs.bug import statements
from bugs.classes import programs

from syncprims.testing import run_world

WAIT = 4  # seconds: the timeout of their calls, which is half an hour by default
BOUND = 15  # seconds: for a whole run
AT_ONCE = 4  # programs
SEED = 56  # of the sample of programs by rule that the rivals run
RESULTS = ROOT / "bench" / "corpus.json"


class Tool:
    """``torch.distributed``, with what a tool replaces."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class Monitored(Tool):
    def barrier(self, group: Any = None, **more: Any) -> Any:
        if more:
            return dist.barrier(group, **more)
        return dist.monitored_barrier(group, timedelta(seconds=WAIT), wait_all_ranks=True)


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


RIVALS = {
    "gloo": "as it is",
    "DETAIL": "`TORCH_DISTRIBUTED_DEBUG=DETAIL`",
    "barriers": "`monitored_barrier` for each barrier",
    "before": "`monitored_barrier` before the line of the bug",
    "stacks": "`faulthandler.dump_traceback_later`",
    "recorder": "torch's flight recorder, with frames",
    "accelerate": "`ACCELERATE_DEBUG_MODE=1`",
}
OURS = ["threads", "processes"]
BY_RULE = ["gloo", "DETAIL", "before", "stacks", "recorder"]
ENVIRON = {
    "DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "accelerate": {"ACCELERATE_DEBUG_MODE": "1"},
    "recorder": {"TORCH_FR_BUFFER_SIZE": "1000"},
}
GUARD = f"dist.monitored_barrier(timeout=__import__('datetime').timedelta(seconds={WAIT}), "


class Case:
    """One program under one rival, in forks of this process, which has one thread only."""

    def __init__(self, bug: Bug, tool: str, twin: bool) -> None:
        self.bug, self.tool, self.twin = bug, tool, twin
        text = bug.text.replace(*bug.mend) if twin else bug.text
        if tool == "before":
            text = re.sub(r"(?m)^( *)(.*# bug)$", rf"\1{GUARD}wait_all_ranks=True); \2", text)
        bug.scope["dist"] = Monitored() if tool == "barriers" else Tool()
        self.run = bug.compile(text)
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "shared").mkdir()
        self.codes = dict[int, int]()
        self.first = BOUND + 1.0  #: when the first rank failed
        self.begin = time.monotonic()
        self.pids = {self._fork(rank): rank for rank in range(bug.ranks)}

    def _fork(self, rank: int) -> int:
        if pid := os.fork():
            return pid
        code, said = 1, (self.folder / f"said.{rank}").open("w")
        os.dup2(said.fileno(), 2)
        try:
            self._run(rank)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            if self.tool == "recorder":
                record(rank)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _run(self, rank: int) -> None:
        bug, world_size = self.bug, self.bug.ranks
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # Accelerate looks for them
        os.environ |= ENVIRON.get(self.tool, {})
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", f"file://{self.folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=WAIT),
        )  # fmt: skip
        if self.tool == "accelerate":
            bug.scope["dist"] = Accelerate()
        if self.tool == "stacks":
            faulthandler.dump_traceback_later(WAIT - 1)
        if self.tool == "recorder":
            timer = threading.Timer(WAIT - 1, record, [rank])
            timer.daemon = True
            timer.start()
        (self.folder / "started").touch()  # its time is that of the last rank
        result = self.run(rank, self.folder / "shared")
        if bug.check:
            bug.check[1](result)
        if dist.is_initialized():
            bug.scope["dist"].barrier()
            dist.destroy_process_group()

    def is_over(self) -> bool:
        """Look at the ranks; end those that have reached the bound."""
        late = time.monotonic() > self.begin + BOUND
        for pid, rank in [*self.pids.items()]:
            if late:
                os.kill(pid, signal.SIGKILL)
            if (ended := os.waitpid(pid, 0 if late else os.WNOHANG))[0]:
                del self.pids[pid]
                self.codes[rank] = os.waitstatus_to_exitcode(ended[1])
                if self.codes[rank]:
                    self.first = min(self.first, time.monotonic() - self.started())
        return not self.pids

    def started(self) -> float:
        """When the last rank had joined: before, a busy machine may take its time."""
        path = self.folder / "started"
        ago = time.time() - path.stat().st_mtime if path.exists() else 0.0
        return time.monotonic() - ago

    def outcome(self) -> str:
        """Return what became of it."""
        said = [
            path.read_text() if (path := self.folder / f"said.{rank}").exists() else ""
            for rank in range(self.bug.ranks)
        ]
        if not (self.folder / "started").exists():
            raise RuntimeError("\n".join([f"{self.tool} did not start:", *said]))
        shutil.rmtree(self.folder)
        if "-v" in sys.argv:
            print(f"== {self.bug.name} {self.tool} {self.codes} {self.first:.1f} s", *said)
        if -signal.SIGSEGV in self.codes.values():
            return "crash"
        if not any(self.codes.values()):
            return "silent"
        late = self.first > WAIT
        if is_named(self.bug, *evidence(self.bug, said)):
            return "late" if late else "named"
        return "hang" if late else "error"


def record(rank: int) -> None:
    """Write the last call that the flight recorder has of this rank."""
    dump = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    if entries := pickle.loads(dump(True, True, False))["entries"]:
        last = entries[-1]
        places = [f"{Path(it['filename']).name}:{it['line']}" for it in last["frames"]]
        call = [last[name] for name in ("profiling_name", "input_sizes", "input_dtypes")]
        print(f"RECORD {call} {' '.join(places[2:4])}", file=sys.stderr, flush=True)


def evidence(bug: Bug, said: list[str]) -> tuple[list[str], dict[int, str]]:
    """Return what the ranks said, in one form, and where each of them stood in the end.

    Reading them together is left to the user, but counts: that is to their advantage.
    """
    stacks, together = dict[int, str](), dict[int, str]()
    for rank, text in enumerate(said):
        text = re.sub(r'File "[^"]*?([^"/]+)", line (\d+)', r"\1:\2", text)
        said[rank] = text.replace("Collectives differ", "\n")
        for line in said[rank].splitlines():
            if len(mentioned := statements(line)) > 1:
                together |= {rank: it for rank, it in mentioned.items() if rank not in together}
        places = re.findall(rf"\b(?:{re.escape(Path(bug.file).name)}|corpus\.py):\d+", text)
        own = [place for place in places if not place.startswith("corpus.py")]
        recorded = re.findall("RECORD .*", text)
        stacks[rank] = (recorded or own or ["at the end" if places else "ended"])[-1]
    said.append("\n".join(f"  rank {rank}: {text}" for rank, text in together.items()))
    return said, stacks


def run_rivals(cases: list[tuple[Bug, str, bool]]) -> list[tuple[Bug, str, bool, str]]:
    """Return the outcome of each case; a few run at once."""
    results, running = [], list[Case]()
    while cases or running:
        while cases and len(running) < AT_ONCE:
            running.append(Case(*cases.pop()))
        time.sleep(0.02)
        for case in [case for case in running if case.is_over()]:
            running.remove(case)
            results.append((case.bug, case.tool, case.twin, case.outcome()))
    return results


def run_ours(bug: Bug, kind: Any, twin: bool = False) -> str:
    if kind not in bug.kinds:
        return "-"
    with tempfile.TemporaryDirectory() as folder:
        result, said = outcome(bug, bug.twin if twin else bug.bug, Path(folder), kind)
    if "-v" in sys.argv:
        print(f"== {bug.name} {kind}: {result}", said)
    return result


def by_rule(tools: list[str], every: dict[str, Any]) -> None:
    """Count, for each class and tool: programs, named at once, named late, seen, false alarms."""
    everything = programs()
    classes = {
        bug.source: [it for it in everything if it.source == bug.source] for bug in everything
    }
    chance = random.Random(SEED)
    sample = [
        it
        for of in classes.values()
        for it in chance.sample(of, min(len(of), max(4, len(of) // 8)))
    ]
    rivals = [tool for tool in BY_RULE if tool in tools]
    runs = run_rivals(
        [(bug, tool, twin) for tool in rivals for bug in sample for twin in (False, True)]
    )
    if "threads" in tools:
        for bug in everything:
            for twin in (False, True):
                runs.append((bug, "threads", twin, run_ours(bug, "threads", twin)))
    counts = defaultdict[str, defaultdict[str, Counter[str]]](lambda: defaultdict(Counter))
    for bug, tool, twin, result in runs:
        count = counts[bug.source][tool]
        if twin:
            count["alarms"] += result != "silent"
        else:
            count["programs"] += 1
            count[result] += 1
    for tool in {tool for _, tool, *_ in runs}:
        for kind in classes:
            every.setdefault(kind, {})[tool] = dict(counts[kind][tool])


PAGE = """\
# Fifty rank bugs

{reported} of these fifty programs rebuild a public report; the others are by construction.
[Each twin](../tests/corpus/test_corpus.py) differs by one replacement of text, and passes. A bug
is *named* if the text has its line and sets its rank apart: it says one thing of all other ranks,
and something else of this one. *Late* is after the timeout. *Warned*: the test passes with a
warning. *Error*: it fails, in other words. The rest *hang* until the timeout, or are *silent*.

The first columns are test worlds with their defaults, and 9 seeds for races, which chance decides
elsewhere. The others are Gloo: as it is; with `TORCH_DISTRIBUTED_DEBUG=DETAIL`; with
`monitored_barrier` for each barrier, or before the line of the bug; with
`faulthandler.dump_traceback_later` (the debug handlers of torch have the same stacks) or the flight
recorder; with `ACCELERATE_DEBUG_MODE=1` and the functions of Accelerate. Their timeout: {wait} s,
not half an hour, and what all ranks wrote was read together. With DETAIL, DDP *crashes*, also under
torchrun. No deadlock tool for mpi4py installs with pip.

|what happened|threads|processes|Gloo|DETAIL|barriers|before|stacks|recorder|Accelerate|
|---|---|---|---|---|---|---|---|---|---|
{rows}
|**named**|{named}|
|**late**|{late}|

## Where a test must look

{checked} programs make right calls, and get wrong weights, samples or numbers. Worlds name {found}
if the test has one line more, such as `replicas=True` or `assert_dealt`. So does Gloo, with a check
in plain torch: {theirs}. Reports: {links}.

## By rule

[The MPI Bugs Initiative](https://github.com/mquinson/MBI) defined these classes. {total} programs
follow from rules: each call, rank and position. A world of threads ran all, the others an eighth of
each class, or 4 (seed {seed}). The calls of a program stand in one line, which stacks cannot tell
apart. Races of messages are left out: worlds refuse a receive without a source. Named+late/run:

|class|threads|Gloo|DETAIL|before|stacks|recorder|
|---|---|---|---|---|---|---|
{classes}
|**all**|{sums}|
|**alarms on twins**|{alarms}|

The alarms of DETAIL are of right programs with messages, which it counts as collectives.

`bench/corpus.py` wrote this page, with {versions}.
"""


def write_page(results: dict[str, Any]) -> None:
    """Write docs/bugs.md."""
    bugs, tools = results["bugs"], [*OURS, *RIVALS]
    rows, kind = [], ""
    for bug in FIFTY:
        if kind != (kind := bug.scope["__doc__"].splitlines()[0].rstrip(".")):
            rows.append(f"|**{kind}**{'|' * 10}")
        cells = "|".join(bugs[bug.name].get(tool, "") for tool in tools)
        rows.append(f"|{link(bug, bug.says_what)}|{cells}|")

    def count(word: str) -> str:
        every = [sum(bugs[bug.name].get(tool) == word for bug in FIFTY) for tool in tools]
        return "|".join(f"**{number}**" for number in every)

    def cell(counts: dict[str, int]) -> str:
        late = f"+{counts['late']}" if counts.get("late") else ""
        return f"{counts.get('named', 0)}{late}/{counts['programs']}" if counts else ""

    ruled = ["threads", *BY_RULE]
    total = {tool: Counter[str]() for tool in ruled}
    for counts in results["classes"].values():
        for tool in ruled:
            total[tool].update(counts.get(tool, {}))
    classes = [
        f"|{name}|{'|'.join(cell(counts.get(tool, {})) for tool in ruled)}|"
        for name, counts in sorted(results["classes"].items())
    ]
    page = PAGE.format(
        reported=sum(bool(bug.source) for bug in FIFTY), wait=WAIT, rows="\n".join(rows),
        named=count("named"), late=count("late"), checked=len(CHECKED),
        found=min(sum(bugs[bug.name].get(tool) == "named" for bug in CHECKED) for tool in OURS),
        theirs=sum(bugs[bug.name].get("gloo") == "named" for bug in CHECKED),
        links=", ".join(link(bug, bug.name.replace("_", " ")) for bug in CHECKED),
        total=total["threads"]["programs"],
        seed=SEED, classes="\n".join(classes),
        sums="|".join(cell(total[tool]) for tool in ruled),
        alarms="|".join(str(total[tool]["alarms"]) for tool in ruled),
        versions=results["versions"],
    )  # fmt: skip
    (ROOT / "docs" / "bugs.md").write_text(page)


def link(bug: Bug, text: str) -> str:
    source = bug.source.replace("#", "/issues/")
    return f"[{text}](https://github.com/{source})" if source else text


def main() -> None:
    torch.set_num_threads(1)
    asked = {*sys.argv[1:]} - {"-v"}
    tools = [tool for tool in [*RIVALS, *OURS] if tool in asked] or [*RIVALS, *OURS]
    bugs = [bug for bug in BUGS if bug.name in asked] or BUGS
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"bugs": {}, "classes": {}}
    if asked == {"classes"}:
        tools, bugs = [*RIVALS, *OURS], []
    # Programs whose calls are right differ from their twins by the check, which all tools share.
    cases = [
        (bug, tool, False) for bug in bugs for tool in tools
        if tool in RIVALS and (tool == "gloo" or not bug.check)
    ]  # fmt: skip
    runs = run_rivals(cases)
    if ruled := not asked - {*tools, "classes"}:
        by_rule([tool for tool in tools if tool in RIVALS], results["classes"])
    if {*OURS} & {*tools}:
        run_world(dist.init_process_group, 2, torch=True)  # imports what is used below, once
        for kind in [tool for tool in OURS if tool in tools]:
            runs += [(bug, kind, False, run_ours(bug, kind)) for bug in bugs]
        if ruled:
            by_rule([tool for tool in tools if tool in OURS], results["classes"])
    for bug, tool, _, result in runs:
        results["bugs"].setdefault(bug.name, {})[tool] = result
    results["bugs"] = {bug.name: results["bugs"].get(bug.name, {}) for bug in BUGS}
    results["versions"] = (
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"Accelerate {version('accelerate')}"
    )
    text = json.dumps(results, indent=1, sort_keys=True)
    text = re.sub(r"\{[^{}]*\}", lambda match: " ".join(match[0].split()), text)  # one line each
    RESULTS.write_text(text + "\n")
    write_page(results)


if __name__ == "__main__":
    main()
