"""Output: `print_main`, `progress` and loggers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from typing import Any

import pytest
from conftest import in_processes, on_every_rank
from support.rank_environment import run_python
from support.rank_worlds import Ranks

import syncprims as sp


def test_print_main_prints_once(world: Ranks) -> None:
    def program() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            sp.print_main("loss", 0.5, sep="=", end="!")
            sp.print_main(" local", local=True)
        return out.getvalue()

    here = world.ranks // world.kind.hosts
    assert world.run(program) == [
        "loss=0.5! local\n" if r == 0 else " local\n" if r % here == 0 else ""
        for r in range(world.ranks)
    ]


class Keep(logging.Handler):
    """Keeps the records of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [
            record.getMessage().partition("] ")[2] or record.getMessage() for record in self.records
        ]


@in_processes
def test_records_carry_the_place_and_the_callers_own_facts(world: Ranks) -> None:
    def program() -> list[Any]:
        keep = Keep()
        logging.getLogger("job").addHandler(keep)
        sp.get_logger("job").warning("at %d%%", 50, extra={"epoch": 3})
        inner = logging.LoggerAdapter(sp.get_logger("job"), {"epoch": 4})
        inner.warning("through another adapter")
        said: list[Any] = [vars(record) for record in keep.records]
        names = ("rank", "world_size", "local_rank", "epoch", "funcName")
        return [[fields[name] for name in names] for fields in said]

    here = world.ranks // world.kind.hosts
    assert world.run(program) == [
        [[r, world.ranks, r % here, epoch, "program"] for epoch in (3, 4)]
        for r in range(world.ranks)
    ]


@in_processes
@on_every_rank
def test_a_line_may_be_for_some_ranks_and_for_once() -> None:
    keep = Keep()
    logging.getLogger("job").addHandler(keep)
    logger = sp.get_logger("job")
    for step in range(2):
        logger.warning("main", main_only=True, once=True)
        logger.warning("local", local=True, once=True)
        sp.get_logger("job").warning("lr %g", 0.1, once=True)
        logger.warning("step %d", step, once=True)
    here = sp.get_world_size() // sp.get_num_nodes()
    rank = sp.get_rank()
    said = keep.texts
    expected = ["main"] if rank == 0 else []
    expected += ["local"] if rank % here == 0 else []
    assert said == [*expected, "lr 0.1", "step 0", "step 1"]


def test_lines_in_order_come_one_rank_after_another(world: Ranks) -> None:
    """Also where some ranks do not show the line: their levels differ."""
    order: list[int] = []

    def program() -> list[int]:
        logger = sp.get_logger(f"job-{sp.get_rank()}", logging.ERROR if sp.get_rank() == 1 else 0)
        keep = Keep()
        logging.getLogger(f"job-{sp.get_rank()}").addHandler(keep)
        logger.warning("mine", in_order=True)
        logger.warning("main's", in_order=True, main_only=True)
        order.append(sp.get_rank())
        counts: list[int] = sp.all_gather(len(keep.records))
        return counts

    expected = [2 if r == 0 else 0 if r == 1 else 1 for r in range(world.ranks)]
    assert world.run(program) == [expected] * world.ranks


ALONE = """
import io, json, logging, sys, syncprims as sp
root = logging.getLogger()
before = root.level, list(root.handlers)
logger = sp.get_logger("job", "INFO")
logging.getLogger("job").addHandler(logging.StreamHandler(sys.stdout))
logger.info("begun")
logger.debug("not shown")
bar = sp.progress((i for i in range(3)), file=io.StringIO(), desc="lines")
bar.set_postfix(loss=1)
manual = sp.progress(total=9, file=io.StringIO())
manual.update(4)
told = [bar.disable, sum(bar), bar.n, manual.n, getattr(manual, "mininterval", None)]
print(json.dumps(told + [(root.level, list(root.handlers)) == before, logger.name]))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_they_work_before_the_world_starts(rank: int) -> None:
    # Nobody could join this world: it has no run id, and no other rank.
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "SYNCPRIMS_BACKEND": "file"}
    done = run_python("-c", ALONE, **place)
    assert done.returncode == 0, done.stderr
    begun, told = done.stdout.splitlines()
    assert begun == f"[rank {rank}] begun"
    seen = [False, 3, 3, 4, 5.0] if rank == 0 else [True, 3, 0, 0, None]
    assert json.loads(told) == [*seen, True, "job"]


@in_processes
@pytest.mark.parametrize("local", [False, True])
def test_progress_shows_one_bar(world: Ranks, local: bool) -> None:
    def program() -> Any:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            total = sum(sp.progress(range(10), local=local, desc="epoch", file=sys.stderr))
        return total, "epoch" in err.getvalue()

    first = world.ranks // world.kind.hosts if local else world.ranks
    assert world.run(program) == [(45, rank % first == 0) for rank in range(world.ranks)]
