"""Unmodified programs give the same numbers in threads, in processes, and on Gloo itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import support.torch_programs as programs
from support.rank_environment import free_port, is_installed

from syncprims.testing import run_world

#: Of torch and of libraries, about themselves.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{category}")
    for category in ("DeprecationWarning", "FutureWarning", "RuntimeWarning", "UserWarning")
]
pytestmark += [pytest.mark.filterwarnings("error::syncprims.UnequalCallSites")]

RANKS = {"fsdp2": 4}


def on_gloo(program: Callable[[], programs.Numbers], ranks: int) -> list[programs.Numbers]:
    """Return what `program` gives in processes whose groups are Gloo's."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def body() -> programs.Numbers:
        os.environ.update(place)
        # A DDP that ends after its group may wait for ever for the threads of Gloo, which wait for
        # the interpreter. The process ends here without either.
        programs.dist.destroy_process_group = lambda group=None: None
        return program()

    return run_world(body, ranks, kind="processes")


def pipeline_hangs_on_gloo() -> bool:
    """Return whether pipelines of this torch drop the handles of sends that are not over.

    Those of torch 2.6 do, and Gloo never ends such a send. Here, a later wait goes on with it.
    """
    from torch.distributed.pipelining import schedules

    return not hasattr(schedules, "_wait_batch_p2p")


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_gives_the_numbers_of_gloo(
    program: Callable[[], programs.Numbers], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SYNCPRIMS_STRICT", "1")  # what torch and libraries call is on no two lines
    # The first import of torch's compiler sets it for good.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    name = program.__name__
    # To import a library here would change the environment, and a folder of tests has the name of
    # one: only what is installed counts.
    if name in programs.LIBRARIES and not is_installed(name):
        pytest.skip(f"needs {name}")
    if name == "fsdp2" and not programs.FSDP2_TRAINS_ON_CPUS:
        pytest.skip("FSDP2 of this torch does not train on CPUs")
    ranks = RANKS.get(name, 2)
    if name == "pipeline" and pipeline_hangs_on_gloo():
        expected = run_world(program, ranks, torch=True)
    else:
        expected = on_gloo(program, ranks)
    assert run_world(program, ranks, torch=True) == expected
    assert run_world(program, ranks, torch=True, kind="processes") == expected
