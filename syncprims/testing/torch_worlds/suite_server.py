"""What the fork server of a suite does first: it imports what the tests have imported.

`multiprocessing` imports this module there. A process of the server is then as a new one, and need
not import torch. What belongs to one module of tests is not imported here: each process has that
of what it imports itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import torch

from syncprims._world.registry import load_backend
from syncprims._world.world import version
from syncprims.c10d.torch_internals import replaced

from . import import_lazy_modules
from .suite_processes import IMPORTS, VARIABLE

#: A module that calls one of these when it is imported sets the state of its process.
_SETTERS: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"), (torch.random, "manual_seed"), (numpy.random, "seed"), (random, "seed"),
    (torch, "set_default_dtype"), (torch, "use_deterministic_algorithms"),
)  # fmt: skip
_importing: list[str] = []  # empty when this server is ready


def _prepare(path: list[str], names: list[str]) -> None:
    sys.path[:] = path
    with replaced(*((owner, name, _refusing(vars(owner)[name])) for owner, name in _SETTERS)):
        for name in names:
            _importing[:] = [name]
            with contextlib.suppress(Exception, SystemExit):  # the processes import it, or fail
                importlib.import_module(name)
    _importing.clear()
    import_lazy_modules()
    load_backend("file")
    version()
    gc.freeze()  # what is never freed stays shared
    os.register_at_fork(after_in_child=functools.partial(_begin, os.getpid()))


def _refusing(setter: Callable[..., Any]) -> Callable[..., Any]:
    """Return `setter`, which now ends the import of the module that calls it."""

    @functools.wraps(setter)
    def refuse_or_set(*args: Any, **named: Any) -> Any:
        if _importing:
            raise ImportError(f"{_importing[0]} sets the state of its process")
        return setter(*args, **named)

    return refuse_or_set


def _begin(server: int) -> None:
    """Give a process of this server seeds of its own; Python does so for `random`."""
    if os.getppid() == server:
        numpy.random.seed()
        cast("Any", torch).default_generator.seed()
        torch.set_num_threads(1)  # the threads of the server are not here


if VARIABLE in os.environ:
    _file = Path(os.environ[VARIABLE], IMPORTS)
    _prepare(*(json.loads(_file.read_text()) if _file.exists() else (sys.path, [])))
