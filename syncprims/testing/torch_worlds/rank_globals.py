"""What a process has one of, kept for each rank that is a thread.

One rank runs at a time. So the globals of the process are changed as the turn passes, and each rank
finds its own environment, random states and groups of ``torch.distributed``, as a process would.
All else is shared: the working directory, modules, warnings, logging, the settings of torch.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch

from syncprims.c10d.torch_internals import PROCESS_ATTRIBUTES


class RankGlobals:
    """The globals of each rank; the process has those of the rank that was entered last.

    They are parts with three methods. ``fresh(rank)`` returns what a rank begins with, ``save()``
    what is there now, and ``load()`` puts either there. A module that a rank imports is seen at the
    next turn.
    """

    def __init__(self, environs: Sequence[Mapping[str, str]]) -> None:
        self._parts: list[Any] = [
            _Environment(environs),
            _PythonRandom(),
            _NumpyRandom(),
            _TorchGlobals(),
            _ModuleHooks(),
        ]
        self._awaited = list(_ATTRIBUTES)  # of modules that have not been imported
        self._modules = 0  # how many had been, at the last look
        self._find_parts()
        self._here: int | None = None  # whose globals the process has; None stands for the test
        self._kept: dict[int | None, list[Any]] = {rank: [] for rank in range(len(environs))}

    def enter(self, rank: int | None) -> None:
        """Give the process the globals of `rank`, or with None, those that it had before."""
        if rank == self._here:
            return
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
        self._here = rank

    def _find_parts(self) -> list[Any]:
        """Add the attributes of modules that have been imported meanwhile, and return them."""
        self._modules = len(sys.modules)
        found = {given: _find(*given) for given in self._awaited}
        self._awaited = [given for given, attribute in found.items() if attribute is None]
        new: list[Any] = [attribute for attribute in found.values() if attribute is not None]
        self._parts += new
        return new


def make_fresh_process(rank: int) -> None:
    """Give this forked process the attributes of a new one, in place of those of its parent."""
    for given in _ATTRIBUTES:
        attribute = _find(*given)
        if attribute is not None:
            attribute.load(attribute.fresh(rank))


class Attribute(NamedTuple):
    """An attribute of a module, or of a class or function in it."""

    owner: Any
    name: str
    fresh: Callable[[int], Any]  #: returns what a new process has there; it takes the rank

    def save(self) -> Any:
        """Return the value, and no descriptor's."""
        return self.owner.__dict__[self.name]

    def load(self, kept: Any) -> None:
        """Set the value."""
        setattr(self.owner, self.name, kept)


def _find(module: str, dotted: str, make: Callable[[int], Any]) -> Attribute | None:
    """Return an attribute, unless its module has not been imported or does not have it."""
    path, _, name = dotted.rpartition(".")
    try:
        found = sys.modules[module]
        owner = attrgetter(path)(found) if path else found
        return Attribute(owner, name, make) if name in vars(owner) else None
    except (KeyError, AttributeError):
        return None


_ATTRIBUTES: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    *PROCESS_ATTRIBUTES,
    ("sys", "excepthook", lambda rank: sys.__excepthook__),  # torch adds the rank to it
    ("accelerate.state", "PartialState._shared_state", lambda rank: {}),
    ("accelerate.state", "AcceleratorState._shared_state", lambda rank: {}),
    ("accelerate.state", "GradientState._shared_state", lambda rank: {}),
    # Of Lightning, which sets it from the environment when it is imported.
    ("lightning_utilities.core.rank_zero", "rank_zero_only.rank", lambda rank: rank),
)


class _Environment:
    """``os.environ``, and what programs in C and child processes see of it."""

    def __init__(self, environs: Sequence[Mapping[str, str]]) -> None:
        environ: Any = os.environ
        self._environ = environ
        self._fresh = [
            {environ.encodekey(name): environ.encodevalue(value) for name, value in one.items()}
            for one in environs
        ]

    def fresh(self, rank: int) -> Any:
        return self._fresh[rank]

    def save(self) -> Any:
        return self._environ._data

    def load(self, kept: Any) -> None:
        before, self._environ._data = self._environ._data, kept
        for name in before.keys() | kept.keys():
            value = kept.get(name)
            if value is None:
                os.unsetenv(name)
            elif value != before.get(name):
                os.putenv(name, value)


class _PythonRandom:
    """The global generator of Python, which gives each forked process other numbers."""

    def __init__(self) -> None:
        outer = random.Random()
        outer.setstate(random.getstate())
        self._seed = outer.getrandbits(64)

    def fresh(self, rank: int) -> Any:
        return random.Random(self._seed + rank).getstate()

    def save(self) -> Any:
        return random.getstate()

    def load(self, kept: Any) -> None:
        random.setstate(kept)


class _TorchGlobals:
    """The global generator and the default dtype of torch; a default device is a thread's own."""

    def __init__(self) -> None:
        self._begin = self.save()

    def fresh(self, rank: int) -> Any:
        return self._begin

    def save(self) -> Any:
        return torch.default_generator.get_state(), torch.get_default_dtype()

    def load(self, kept: Any) -> None:
        state, dtype = kept
        torch.default_generator.set_state(state)
        if dtype is not torch.get_default_dtype():
            torch.set_default_dtype(dtype)


class _ModuleHooks:
    """The hooks of all modules of torch: what a test has registered holds for each rank."""

    def __init__(self) -> None:
        self._module: dict[str, Any] = torch.nn.modules.module.__dict__
        self._begin = {k: v for k, v in self._module.items() if k.startswith("_global_")}

    def fresh(self, rank: int) -> Any:
        return {name: copy.copy(value) for name, value in self._begin.items()}

    def save(self) -> Any:
        return {name: self._module[name] for name in self._begin}

    def load(self, kept: Any) -> None:
        self._module.update(kept)


_numpy: Any = numpy.random  # its types leave some functions out


class _NumpyState(NamedTuple):
    """The global generator of numpy."""

    bits: Any  #: the bit generator, with its state
    memory: bytes | None  #: that holds this state, where it is known
    whole: dict[str, Any] | None  #: the state with the second number of a pair, if there is one


class _NumpyRandom:
    """The global generator of numpy: each rank has a bit generator of its own."""

    _SIZE = 2500  # bytes of the state of an MT19937

    def __init__(self) -> None:
        self._loaded: _NumpyState | None = None
        self._begin = self.save()

    def fresh(self, rank: int) -> Any:
        return self._begin._replace(bits=copy.deepcopy(self._begin.bits))

    def save(self) -> Any:
        bits, last = _numpy.get_bit_generator(), self._loaded
        memory = None
        if isinstance(bits, numpy.random.MT19937):
            memory = ctypes.string_at(bits.ctypes.state_address, self._SIZE)
        # To read the whole state takes 25 us, and few programs use it.
        if last and (last.bits, last.memory, last.whole) == (bits, memory, None) and memory:
            return last
        state: Any = _numpy.get_state(legacy=False)
        return _NumpyState(bits, memory, state if state["has_gauss"] else None)

    def load(self, kept: Any) -> None:
        _numpy.set_bit_generator(kept.bits)  # there is no second number then
        if kept.whole is not None:
            _numpy.set_state(kept.whole)
        self._loaded = kept
