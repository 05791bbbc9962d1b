"""The same barrier in other hands: what comes with Python, with the compiler, and with torch."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent


def pthread(ranks: int, rounds: int) -> float | None:
    """Return microseconds per process-shared pthread barrier; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pthread_barrier"
        source = HERE / "pthread_barrier.c"
        command = [compiler, "-O2", "-pthread", "-o", str(program), str(source)]
        subprocess.run(command, check=True)
        done = subprocess.run(
            [program, str(ranks), str(rounds)], check=True, capture_output=True, text=True
        )
    return float(done.stdout)


def multiprocessing_barrier(ranks: int, rounds: int) -> float:
    """Return microseconds per `multiprocessing.Barrier.wait`."""
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.SimpleQueue()
    processes = [
        context.Process(target=_wait_often, args=(barrier, results if rank == 0 else None, rounds))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    figure = float(results.get())
    for process in processes:
        process.join()
    return figure


def _wait_often(barrier: mp.synchronize.Barrier, results: object, rounds: int) -> None:
    barrier.wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        barrier.wait()
    if results is not None:
        results.put((time.perf_counter() - begin) / rounds * 1e6)  # type: ignore[attr-defined]


_GLOO = """
import sys, time, torch.distributed as dist
dist.init_process_group("gloo")
rounds = int(sys.argv[1])
dist.barrier()
begin = time.perf_counter()
for _ in range(rounds):
    dist.barrier()
if dist.get_rank() == 0:
    print((time.perf_counter() - begin) / rounds * 1e6)
dist.destroy_process_group()
"""


def gloo(ranks: int, rounds: int) -> float | None:
    """Return microseconds per Gloo barrier under torchrun; None without torch."""
    if find_spec("torch") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "gloo_barrier.py"
        script.write_text(_GLOO)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={ranks}", str(script), str(rounds)],
            check=True, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return float(done.stdout.split()[-1])
