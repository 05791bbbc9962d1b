"""What a bug of the corpus consists of, how it runs, and what a report must say of it."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from syncprims import SyncError, UnequalCallSites
from syncprims.testing import run_world

RANKS = 3
Kind = Literal["threads", "processes"]  # of world
Program = Callable[[int, Path], Any]
Check = tuple[Callable[[Any], None], Callable[[Any], None]]  # ours, and one in plain torch


@dataclass(frozen=True, eq=False)
class Bug:
    """A program with a bug; it gets its rank, and a directory that all ranks share.

    The line of the bug ends in ``# bug``. The twin is the same text with one replacement.
    """

    name: str
    text: str
    begin: int  #: the number of the first line
    file: str
    scope: dict[str, Any] = field(repr=False)
    source: str  #: owner/repo#n, or "" if no public report is known
    guilty: tuple[int, ...]  #: ranks; none if all are alike, or in a race, which any may lose
    mend: tuple[str, str]
    ranks: int = RANKS
    seeds: int = 1  #: schedules to try: some bugs are seen in some orders only
    kinds: tuple[Kind, ...] = ("threads", "processes")
    chance: tuple[Kind, ...] = ()  #: where neither the program nor a seed decides what happens
    check: Check | None = None  #: the line that a user writes, where no call is wrong
    replicas: bool = False  #: whether that line is ``replicas=True``
    says: str = ""  #: what the check must say

    def compile(self, text: str) -> Program:
        """Return this text as a function, whose lines have the numbers of the source."""
        scope = self.scope  # a tool replaces ``dist`` there
        exec(compile("\n" * (self.begin - 1) + text, self.file, "exec"), scope)
        return scope.pop(self.name)  # type: ignore[no-any-return]

    @cached_property
    def bug(self) -> Program:
        return self.compile(self.text)

    @cached_property
    def twin(self) -> Program:
        """The program without its bug."""
        assert self.text.count(self.mend[0]) == 1, f"{self.name}: {self.mend[0]!r}"
        return self.compile(self.text.replace(*self.mend))

    @property
    def says_what(self) -> str:
        return (inspect.getdoc(self.bug) or "").rstrip(".")

    @property
    def places(self) -> list[tuple[str, int]]:
        """The lines of the bug, which its source marks."""
        lines = enumerate(self.text.splitlines(), self.begin)
        return [(Path(self.file).name, n) for n, line in lines if line.endswith("# bug")]


ALL: list[Bug] = []


def bug(
    source: str, guilty: int | tuple[int, ...], old: str, new: str, **more: Any
) -> Callable[[Program], Program]:
    """Add a function to the corpus."""

    def add(run: Program) -> Program:
        lines, begin = inspect.getsourcelines(run)
        first = next(i for i, line in enumerate(lines) if line.startswith("def "))
        ALL.append(
            Bug(
                run.__name__, "".join(lines[first:]), begin + first, inspect.getfile(run),
                {**run.__globals__}, source, guilty if isinstance(guilty, tuple) else (guilty,),
                (old, new), **more,
            )
        )  # fmt: skip
        return run

    return add


def ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count)


def three() -> list[torch.Tensor]:
    return [ones(6), ones(6), ones(6)]


def wrapped(*layers: nn.Module, **options: Any) -> nn.parallel.DistributedDataParallel:
    """Return these layers, or a small one, in DDP."""
    return nn.parallel.DistributedDataParallel(
        nn.Sequential(*(layers or [nn.Linear(2, 1)])), **options
    )


def run_bug(
    bug: Bug, run: Program, folder: Path, seed: int | None = None, kind: Kind = "threads"
) -> None:
    """Run this bug or its twin in a test world, with the line that looks at what comes of it."""

    def program() -> None:
        dist.init_process_group("gloo")
        result = run(dist.get_rank(), folder)
        if bug.check:
            bug.check[0](result)
        if dist.is_initialized():
            dist.barrier()  # as most programs do at their end
            dist.destroy_process_group()

    run_world(program, bug.ranks, kind=kind, torch=True, replicas=bug.replicas, seed=seed)


def outcome(bug: Bug, run: Program, folder: Path, kind: Kind = "threads") -> tuple[str, str]:
    """Return what a test has with the defaults, and all that it says: also the warnings."""
    warned = ""
    for seed in range(bug.seeds if kind == "threads" else 1):
        own = folder / f"{run is bug.twin} {kind} {seed}"
        own.mkdir()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run_bug(bug, run, own, seed, kind)
            except BaseException as error:
                said = [*describe(error), warning_text(caught)]
                return "named" if is_named(bug, said) else "error", "\n".join(said)
        warned = warned or warning_text(caught)
    return ("warned" if warned else "silent"), warned


def warning_text(caught: list[warnings.WarningMessage]) -> str:
    return "\n".join(str(it.message) for it in caught if it.category is UnequalCallSites)


def describe(error: BaseException) -> list[str]:
    """Return the texts of an error of a world: its own, and where the program's own came from."""
    if isinstance(error, SyncError):
        return [str(error)]
    notes = "\n".join(getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__traceback__)
    places = "".join(f"\n{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    # A rank that is a process has left its traceback in the cause.
    places += str(error.__cause__ or "").replace('.py", line ', ".py:")
    raisers = ", ".join(re.findall(r"rank (\d+)(?: of \d+)?: raised", notes))
    return [f"{error}\nranks [{raisers}] raised", places]


def is_named(bug: Bug, said: Iterable[str], stacks: dict[int, str] | None = None) -> bool:
    """Return whether texts have a line of the bug, and set its guilty ranks apart.

    They are apart if a text, or the stacks by rank, say one thing of all other ranks, which are
    more, and something else of each of them. Of a rank that it does not mention, a text says "".
    """
    said = [*said]
    whole = "\n".join([*said, *(stacks or {}).values()])
    if bug.check:
        return bug.says in whole
    if not any(f"{file}:{line}" in whole for file, line in bug.places):
        return False
    blocks = [statements(block) for text in said for block in blocks_of(text)]
    return not bug.guilty or any(is_apart(bug, said) for said in [*blocks, stacks or {}] if said)


def is_apart(bug: Bug, said: dict[int, str]) -> bool:
    every = [said.get(rank, "") for rank in range(bug.ranks)]
    ours = [every[rank] for rank in bug.guilty]
    theirs = [text for rank, text in enumerate(every) if rank not in bug.guilty]
    return len({*theirs} - {*ours}) == len({*theirs}) == 1 and (
        max(map(ours.count, ours)) < len(theirs)
    )


def blocks_of(text: str) -> list[str]:
    """Return the lines of a text; indented ones that begin with a rank are one block."""
    lines = text.splitlines()
    listed = [line for line in lines if re.match(r"  ranks? ", line)]
    return ["\n".join(listed), *(line for line in lines if line not in listed)]


MENTION = re.compile(
    r"(?:^|[;:,.(\]]|\bbut\b|\band\b|\bwhile\b)\s*ranks? \[?(\d+(?:, \d+)*)\]?(?: of \d+)?:?",
    re.M | re.I,
)


def statements(block: str) -> dict[int, str]:
    """Return what a text says of each rank that it mentions."""
    _, *parts = MENTION.split(block)
    said = dict[int, str]()
    for ranks, text in zip(parts[::2], parts[1::2], strict=True):
        for rank in ranks.split(", "):
            said.setdefault(int(rank), re.sub(r"round \d+", "", text).strip(" ,;\n"))
    return said
