"""Say it once."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import in_processes

import syncprims as sp

if TYPE_CHECKING:
    from harness import Ranks


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


@in_processes
def test_log_lines_carry_the_rank(world: Ranks) -> None:
    def program() -> list[tuple[str, str]]:
        said: list[tuple[str, str]] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said.append((record.getMessage(), record.filename))

        logging.getLogger("job").addHandler(Keep())
        logger = sp.get_logger("job")
        logger.warning("step %d", 3)
        logger.warning("once", main_only=True)
        logger.debug("not enabled")
        return said

    for rank, said in enumerate(world.run(program)):
        prefix = f"[rank {rank}] " if world.ranks > 1 else ""
        expected = [prefix + "step 3"] + ([prefix + "once"] if rank == 0 else [])
        assert [text for text, _ in said] == expected
        assert {name for _, name in said} == {"test_output.py"}


@in_processes
def test_progress_shows_one_bar(world: Ranks) -> None:
    pytest.importorskip("tqdm")

    def program() -> Any:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            total = sum(sp.progress(range(10), desc="epoch", file=sys.stderr))
        return total, "epoch" in err.getvalue()

    assert world.run(program) == [(45, rank == 0) for rank in range(world.ranks)]
