"""What a bug of the corpus consists of, and what its programs share."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from syncprims import CollectiveMismatch, SyncError, UnequalCallSites
from syncprims.testing import run_world

RANKS = 3
Kind = Literal["threads", "processes"]  # of world


class Bug:
    """A rank bug that was reported in public; the docstring of each says what its users saw.

    `bug` and `mended` run on every rank of a world with a process group of ``torch.distributed``.
    They get the rank and a directory that all ranks share.
    """

    ALL: ClassVar[list[type[Bug]]] = []

    source: ClassVar[str]  #: owner/repo#n
    rank: ClassVar[int]  #: whose behaviour differs from what the others expect
    error: ClassVar[type[BaseException]] = CollectiveMismatch  #: what a test world raises
    says: ClassVar[str] = ""  #: what the report says, beyond rank and lines
    ranks: ClassVar[int] = RANKS
    replicas: ClassVar[bool] = False  #: whether its test compares them
    seeds: ClassVar[int] = 1  #: schedules to try: some bugs are seen in some orders only

    def __init_subclass__(cls) -> None:
        if "source" in vars(cls):
            Bug.ALL.append(cls)

    @staticmethod
    def bug(rank: int, folder: Path) -> Any:
        """Run the program with its bug."""
        raise NotImplementedError

    @staticmethod
    def mended(rank: int, folder: Path) -> Any:
        """Run the program without it."""
        raise NotImplementedError

    @classmethod
    def kind(cls) -> str:
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def lines(cls) -> list[int]:
        """Return the lines of the bug, which its source marks."""
        lines, begin = inspect.getsourcelines(cls.bug)
        return [begin + i for i, line in enumerate(lines) if line.rstrip().endswith("# bug")]

    # A test of a silent bug compares replicas, or has one of these calls more.

    @staticmethod
    def look(result: Any, /) -> None:
        """Look at what this rank returned, on each rank."""

    @staticmethod
    def check(results: list[Any], /) -> None:
        """Look at what all ranks returned, after the world."""


def ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count)


def wrapped(*layers: nn.Module, **options: Any) -> nn.parallel.DistributedDataParallel:
    """Return these layers, or a small one, in DDP."""
    return nn.parallel.DistributedDataParallel(
        nn.Sequential(*(layers or [nn.Linear(2, 1)])), **options
    )


def alike(right: float) -> Callable[[list[Any]], None]:
    """Return a check that each rank has this number."""

    def check(results: list[Any], /) -> None:
        for rank, result in enumerate(results):
            assert abs(result - right) < 1e-6, f"rank {rank}: {result}, where {right} is right"

    return check


def run_bug(
    bug: type[Bug],
    run: Callable[[int, Path], Any],
    folder: Path,
    seed: int | None = None,
    kind: Kind = "threads",
) -> None:
    """Run this bug or its twin in a test world, and look at what comes of it."""

    def program() -> Any:
        dist.init_process_group("gloo")
        result = run(dist.get_rank(), folder)
        bug.look(result)
        dist.barrier()  # as most programs do at their end
        dist.destroy_process_group()
        return result

    results = run_world(program, bug.ranks, kind=kind, torch=True, replicas=bug.replicas, seed=seed)
    bug.check(results)


def found(bug: type[Bug], folder: Path, kind: Kind = "threads") -> BaseException | None:
    """Return what a test world raises for this bug."""
    for seed in range(bug.seeds):
        own = folder / str(seed)
        own.mkdir()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UnequalCallSites)
                run_bug(bug, bug.bug, own, seed, kind)
        except BaseException as error:
            return error
    return None


def report(bug: type[Bug], error: BaseException) -> str:
    """Return what the error does not say of this bug; "" if it says all."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if not isinstance(error, SyncError):  # the program's own, with its traceback
        frames = traceback.extract_tb(error.__traceback__)
        text += "".join(f"\n{frame.filename}:{frame.lineno}" for frame in frames)
        # A rank that is a process has left its traceback there.
        text += str(error.__cause__ or "").replace('.py", line ', ".py:")
    places = [f"{bug.kind()}.py:{line}" for line in bug.lines()]
    missing = [it for it in [bug.says, *places] if it not in text]
    if not re.search(rf"\branks? \[?(?:\d+, )*{bug.rank}\b", text):
        missing.append(f"rank {bug.rank}")
    if missing or not isinstance(error, bug.error):
        return f"{bug.error.__name__} with {missing} is not in {type(error).__name__}: {text}"
    return ""
