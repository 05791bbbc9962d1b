"""``torch.distributed`` in a world of a test: its groups meet at the boards of this world.

A program finds what it would find under torchrun, whatever backend it asks for. In a world of
threads, what torch keeps for a process is kept for each rank (:mod:`.rank_globals`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from syncprims.c10d import NAME
from syncprims.c10d.torch_internals import forget_groups, serve_any_name, threads_as_processes

from .rank_globals import RankGlobals, make_fresh_process
from .world_store import make_store


def torchrun_variables(rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun sets beside the numbers of a rank that are in `environ`."""
