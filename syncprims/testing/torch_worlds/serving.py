"""``torch.distributed`` in the world of a test: its groups meet at the boards of this world.

A program finds what it would find under torchrun, whatever backend it asks for. In a world of
threads, what torch keeps for a process is kept for each rank (`rank_globals`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from syncprims._world.host import free_port
from syncprims._world.runtime import current
from syncprims.c10d import serve_every_backend
from syncprims.c10d.torch_internals import (
    forget_group_names,
    replaced_rendezvous,
    threads_as_processes,
)

from .rank_globals import RankGlobals, make_fresh_process
from .store import FileTable, SharedTable, Table, WorldStore


def make_torchrun_variables() -> dict[str, str]:
    """Return what torchrun sets for all ranks alike, beside their number."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


class _Rendezvous:
    """Where the ranks of a world find each other, whatever URL their program names."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._stores: dict[int, list[WorldStore]] = {}  # torch keeps only the C++ part of one

    def __call__(self, url: str, rank: int, world_size: int) -> tuple[WorldStore, int, int]:
        """Return the store of this rank, its number, and how many ranks there are.

        :raises ValueError: if the program says other numbers.
        """
        world = current()
        for given, number, what in (
            (rank, world.rank, "rank"),
            (world_size, world.world_size, "world_size"),
        ):
            if given not in (-1, number):
                raise ValueError(
                    f"init_process_group({what}={given}): in this world it is {number}"
                )
        stores = self._stores.setdefault(world.rank, [])
        stores.append(WorldStore(self._table, world, f"{len(stores)}/"))
        return stores[-1], world.rank, world.world_size


@contextlib.contextmanager
def _serve(table: Table) -> Generator[None]:
    """Serve, within the block, every group that this process opens."""
    with replaced_rendezvous(_Rendezvous(table)), serve_every_backend():
        yield


class TorchThreads:
    """Serves ``torch.distributed`` in a world of threads."""

    def __init__(self, environs: Sequence[Mapping[str, str]]) -> None:
        # Its functions keep the default group that there is when it is imported: no rank's own one.
        importlib.import_module("torch.distributed.nn.functional")
        self._globals = RankGlobals(environs)
        self.enter = self._globals.enter  #: see there; called with each rank that gets the turn

    @contextlib.contextmanager
    def serve(self) -> Generator[None]:
        """Return a context for the whole process, in which the ranks run."""
        threads = torch.get_num_threads()
        # `torch.get_default_device` of torch 2.6 does not see a `with torch.device(...)`.
        self._device, self._grad = torch.empty(0).device, torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        with _serve(SharedTable()), threads_as_processes():
            torch.set_num_threads(1)  # as in a process of a test; each new thread inherits it
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                self._globals.restore()

    def as_rank(self, fn: Callable[[], Any]) -> Callable[[], Any]:
        """Return `fn` as a rank's thread is to call it: with what a forked process inherits."""

        def run() -> Any:
            __tracebackhide__ = True
            # Backward passes run in this thread alone, also on devices.
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.inference_mode(self._inference),
                torch.autocast("cpu", *self._autocast),
            ):
                torch.set_grad_enabled(self._grad)
                if self._device.type != "cpu":
                    torch.set_default_device(self._device)
                try:
                    return fn()
                finally:
                    forget_group_names()

        return run


def serve_in_process(rank: int, table_path: Path) -> None:
    """Serve ``torch.distributed`` in this process, which is a rank, until its end."""
    make_fresh_process(rank)
    forget_group_names()
    _serving.enter_context(_serve(FileTable(table_path)))


_serving = contextlib.ExitStack()  # never closed: the process ends before
