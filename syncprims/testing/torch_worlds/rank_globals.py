"""Globals of a process, kept separately for each rank that is a thread.

One rank runs at a time. So the globals of the process are changed as the turn passes, and each rank
finds its own environment, random states and groups of ``torch.distributed``, as a process would.
So are the patches that it makes. All else is shared: the working directory, modules, the settings
of torch. What ranks have changed there is put back at the end.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import locale
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from syncprims.c10d.private_names import NAMES as OF_TORCH
from syncprims.c10d.torch_internals import PROCESS_ATTRIBUTES, PROCESS_TABLES
from syncprims.testing.patches import lift, restore
from syncprims.testing.private_names import NAMES

_cuda: Any = torch.cuda  # partly typed


class RankGlobals:
    """The globals of each rank; the process has those of the rank that was entered last.

    A module that a rank imports is seen at the next turn.
    """

    def __init__(self, environs: Sequence[Mapping[str, str]]) -> None:
        self._parts = [
            _environment(environs),
            _python_random(),
            _numpy_random(),
            _torch_globals(),
            _module_hooks(),
            _record_factory(),
        ]
        self._awaited = [*_FINDERS]  # of modules that have not been imported
        self._modules = 0  # how many had been, at the last look
        self._find_parts()
        self._settings = [get() for get, _ in _SETTINGS]
        self._here: int | None = None  # whose globals the process has; None: those of the test
        self._lifted: dict[int | None, Any] = {}  # patches of those that do not have the turn
        self._kept: dict[int | None, list[Any]] = {rank: [] for rank in range(len(environs))}

    def enter(self, rank: int | None) -> None:
        """Give the process the globals of `rank`, or with None, those that it had before."""
        if rank == self._here:
            return
        # Patches are undone first and made again last: what they replace may be one of the parts.
        self._lifted[self._here] = lift()
        if len(sys.modules) != self._modules:
            # Whoever leaves has imported something, and what is there now is its own.
            new = self._find_parts()
            if self._here is not None:
                self._kept[None] += [part.fresh(0) for part in new]
        self._kept[self._here] = [part.save() for part in self._parts]
        kept = self._kept[rank]
        kept += [part.fresh(rank or 0) for part in self._parts[len(kept) :]]
        for part, value in zip(self._parts, kept, strict=True):
            part.load(value)
        restore(self._lifted.pop(rank, []))
        self._here = rank
        if rank is None:
            with contextlib.ExitStack() as undo:  # all, also if one raises
                for (get, put), value in zip(_SETTINGS, self._settings, strict=True):
                    if get() != value:
                        undo.callback(put, value)

    def _find_parts(self) -> list[_Part]:
        """Add the attributes of modules that have been imported meanwhile, and return them."""
        self._modules = len(sys.modules)
        parts = {find: find() for find in self._awaited}
        self._awaited = [find for find, part in parts.items() if part is None]
        new = [part for part in parts.values() if part is not None]
        self._parts += new
        return new


def make_fresh_process(rank: int) -> None:
    """Give this forked process the attributes of a new one, in place of those of its parent."""
    for find in _FINDERS:
        part = find()
        if part is not None:
            part.load(part.fresh(rank))


def check_names() -> None:
    """Check the names of torch, and of others, also of modules that nothing has imported yet.

    Ranks would share what is not found.

    :raises BackendUnavailable: if a package has another name for one of them.
    """
    OF_TORCH.check()
    NAMES.check()


@dataclass(frozen=True)
class _Part:
    """Something of which a process has one."""

    fresh: Callable[[int], Any]  #: returns the initial state of a rank
    save: Callable[[], Any]  #: returns the present state
    load: Callable[[Any], None]  #: puts either there


def _find_attribute(module: str, dotted: str, fresh: Callable[[int], Any]) -> _Part | None:
    """Return an attribute, unless its module has not been imported."""
    path, _, name = dotted.rpartition(".")
    owner: Any = _find_owner(module, path)
    if owner is None or (dotted == _SET_BY_LIGHTNING and name not in vars(owner)):
        return None
    # The value itself, and no descriptor's.
    values: Mapping[str, Any] = vars(owner)
    return _Part(fresh, partial(values.__getitem__, name), partial(setattr, owner, name))


def _find_owner(module: str, path: str) -> Any:
    owner = sys.modules.get(module)
    return attrgetter(path)(owner) if owner is not None and path else owner


def _find_tables(module: str, path: str) -> _Part | None:
    """Return all tables of a module or class, which are empty in a new process."""
    owner = _find_owner(module, path)
    if owner is None:
        return None

    def save() -> dict[str, Any]:
        # By the type alone: torch warns where one asks for the class of some of its attributes.
        found = vars(owner).items()
        return {
            name: value
            for name, value in found
            if issubclass(type(value), dict | set) and not name.startswith("__")
        }

    def fresh(rank: int) -> dict[str, Any]:
        tables: dict[str, Any] = {name: copy.copy(table) for name, table in save().items()}
        for table in tables.values():
            table.clear()
        return tables

    def load(kept: dict[str, Any]) -> None:
        for name, table in kept.items():
            setattr(owner, name, table)

    return _Part(fresh, save, load)


_SET_BY_LIGHTNING = "rank_zero_only.rank"  # from the environment, when it is imported
_ATTRIBUTES: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    *PROCESS_ATTRIBUTES,
    ("sys", "excepthook", lambda rank: sys.__excepthook__),  # torch adds the rank to it
    ("sys", "argv", lambda rank: [*sys.argv]),
    ("sys", "path", lambda rank: [*sys.path]),
    ("logging", "root.handlers", lambda rank: [*logging.root.handlers]),
    ("unittest.mock", "_patch._active_patches", lambda rank: []),
    # What `catch_warnings` changes for the time of its block.
    ("warnings", "filters", lambda rank: [*warnings.filters]),
    ("warnings", "showwarning", lambda rank: warnings.showwarning),
    ("warnings", "_showwarnmsg_impl", lambda rank: NAMES["_showwarnmsg_impl"]),
    ("accelerate.state", "PartialState._shared_state", lambda rank: {}),
    ("accelerate.state", "AcceleratorState._shared_state", lambda rank: {}),
    ("accelerate.state", "GradientState._shared_state", lambda rank: {}),
    ("lightning_utilities.core.rank_zero", _SET_BY_LIGHTNING, lambda rank: rank),
)
_FINDERS: tuple[Callable[[], _Part | None], ...] = (
    *(partial(_find_attribute, *given) for given in _ATTRIBUTES),
    *(partial(_find_tables, *given) for given in PROCESS_TABLES),
)


def _directory() -> Path | None:
    with contextlib.suppress(OSError):  # it may have been removed
        return Path.cwd()
    return None


def _enter_directory(path: Path | None) -> None:
    if path is not None:
        os.chdir(path)


_torch: Any = torch  # its types leave some functions out
#: Of the process; ranks share them, and the process has the old ones after the world.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_directory, _enter_directory),
    (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    (lambda: logging.root.level, logging.root.setLevel),
    (lambda: logging.root.manager.disable, logging.disable),
    (_torch.get_deterministic_debug_mode, _torch.set_deterministic_debug_mode),
    (_torch.get_float32_matmul_precision, _torch.set_float32_matmul_precision),
    (_torch.is_anomaly_enabled, _torch.autograd.set_detect_anomaly),
    (_torch.get_num_threads, _torch.set_num_threads),
    *(
        (partial(getattr, owner, name), partial(setattr, owner, name))
        for owner, name in (
            (_torch.backends.cudnn, "deterministic"),
            (_torch.backends.cudnn, "benchmark"),
            (_torch.utils.deterministic, "fill_uninitialized_memory"),
        )
    ),
)


def _environment(environs: Sequence[Mapping[str, str]]) -> _Part:
    """Return ``os.environ``, and what programs in C and child processes see of it."""
    environ: Any = os.environ

    def fresh(rank: int) -> Any:
        pairs = environs[rank].items()
        return {environ.encodekey(name): environ.encodevalue(value) for name, value in pairs}

    def load(kept: dict[bytes, bytes]) -> None:
        before = NAMES.of(environ, "environ._data")
        NAMES.set(environ, "environ._data", kept)
        for name in before.keys() | kept.keys():
            value = kept.get(name)
            if value is None:
                os.unsetenv(name)
            elif value != before.get(name):
                os.putenv(name, value)

    return _Part(fresh, lambda: NAMES["environ._data"], load)


def _python_random() -> _Part:
    """Return the global generator of Python, which gives each forked process other numbers."""
    outer = random.Random()
    outer.setstate(random.getstate())
    seed = outer.getrandbits(64)
    return _Part(
        lambda rank: random.Random(seed + rank).getstate(), random.getstate, random.setstate
    )


def _torch_globals() -> _Part:
    """Return torch's global generators and default dtype; a default device is a thread's own."""

    def save() -> Any:
        devices = _cuda.get_rng_state_all() if _cuda.is_initialized() else None
        return torch.default_generator.get_state(), torch.get_default_dtype(), devices

    def load(kept: Any) -> None:
        state, dtype, devices = kept
        torch.default_generator.set_state(state)
        if devices is not None:
            _cuda.set_rng_state_all(devices)
        elif _cuda.is_initialized():  # by another rank: as it is in a new process
            _cuda.manual_seed_all(torch.initial_seed())
        if dtype is not torch.get_default_dtype():
            torch.set_default_dtype(dtype)

    begin = save()
    return _Part(lambda rank: begin, save, load)


def _record_factory() -> _Part:
    """Return what makes the records of loggers."""
    get: Callable[[], Any] = logging.getLogRecordFactory
    return _Part(lambda rank: get(), get, logging.setLogRecordFactory)


def _module_hooks() -> _Part:
    """Return the hooks of all modules of torch: what a test has registered holds for each rank."""
    module: dict[str, Any] = torch.nn.modules.module.__dict__
    begin = {k: v for k, v in module.items() if k.startswith("_global_")}
    return _Part(
        lambda rank: {name: copy.copy(value) for name, value in begin.items()},
        lambda: {name: module[name] for name in begin},
        module.update,
    )


_numpy: Any = numpy.random  # its types leave some functions out


class _NumpyState(NamedTuple):
    """The global generator of numpy."""

    bits: Any  #: the bit generator, with its state
    memory: bytes | None  #: that holds this state, where it is known
    whole: dict[str, Any] | None  #: the state with the second number of a pair, if there is one


_NUMPY_SIZE = 2500  # bytes of the state of an MT19937


def _numpy_random() -> _Part:
    """Return the global generator of numpy: each rank has a bit generator of its own."""
    loaded: _NumpyState | None = None

    def save() -> Any:
        bits = _numpy.get_bit_generator()
        memory = None
        if isinstance(bits, numpy.random.MT19937):
            memory = ctypes.string_at(bits.ctypes.state_address, _NUMPY_SIZE)
        # To read the whole state takes 25 us, and few programs use it.
        if loaded and memory and loaded == (bits, memory, None):
            return loaded
        state = _numpy.get_state(legacy=False)
        return _NumpyState(bits, memory, state if state["has_gauss"] else None)

    def load(kept: _NumpyState) -> None:
        nonlocal loaded
        _numpy.set_bit_generator(kept.bits)  # there is no second number then
        if kept.whole is not None:
            _numpy.set_state(kept.whole)
        loaded = kept

    begin = save()
    return _Part(lambda rank: begin._replace(bits=copy.deepcopy(begin.bits)), save, load)
