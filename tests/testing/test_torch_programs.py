"""Unmodified programs give the same numbers in threads, in processes, and on Gloo itself."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from support import torch_programs as programs

from syncprims.testing import run_world

RANKS = {"hsdp": 4, "plain_calls": 4}


def on_gloo(program: object, ranks: int, folder: Path) -> list[object]:
    """Return what `program` gives in processes with groups of Gloo."""

    def body() -> object:
        os.environ["PROGRAM_STORE"] = f"file://{folder / 'store'}?rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}"
        os.environ |= {"MASTER_ADDR": "127.0.0.1"}
        return program()

    return run_world(body, ranks, kind="processes")


@pytest.mark.parametrize("name", [p.__name__ for p in programs.PROGRAMS] + ["hsdp"])
def test_a_program_gives_the_numbers_of_gloo(name: str, tmp_path: Path) -> None:
    program = getattr(programs, name)
    ranks = RANKS.get(name, 2)
    gloo = on_gloo(program, ranks, tmp_path)
    threads = run_world(program, ranks, torch=True)
    processes = run_world(program, ranks, torch=True, kind="processes")
    assert threads == gloo
    assert processes == gloo
