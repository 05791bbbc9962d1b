"""Where the numbers of a value lie in memory: prepared once for all values of one shape.

A training loop makes the same calls again and again with new numbers. What stays the same is made
once: the description of the value, which travels as a part of the note's label, and the places of
all members' numbers. They lie side by side, one *slot* per member.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

from syncprims.errors import EncodingError

from . import codec, reduction
from .arrays import Spec, flat, is_fillable, library_of, raw, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from syncprims.interface import Note, Window

    Memory = memoryview | bytearray

_LINE = 64  # bytes, of a processor's cache
_CRC = 4  # bytes
_MOST_NUMBERS = 64  # in one container
_LONGEST = 1024  # bytes of a description: a label has to fit into a cell
_CODES = {float: "d", int: "q"}


def key_of(value: Any) -> Hashable:
    """Return what is the same for all values of one layout; None for most that have none."""
    kind = type(cast("object", value))
    if kind is float or kind is int:
        return (kind,)
    if kind is dict:
        kinds = *map(type, value), *map(type, value.values())
        return (kind, *value, *kinds) if len(value) <= _MOST_NUMBERS else None
    if kind is list or kind is tuple:
        return (kind, *map(type, value)) if len(value) <= _MOST_NUMBERS else None
    library = library_of(value)
    if library == "numpy":
        return value.dtype, value.shape
    if library == "torch":
        return value.dtype, value.shape, value.device, value.layout, value.requires_grad
    return None


def make_layout(value: Any, members: int) -> Layout | None:
    """Return the layout of values like this one; None if they have none."""
    kind = type(cast("object", value))
    made: Layout | None = None
    if kind in _CODES:
        made = NumberLayout(value, members)
    elif kind in (dict, list, tuple):
        keys, numbers = (value, value.values()) if kind is dict else ((), value)
        if value and {type(key) for key in keys} <= {str} and {*map(type, numbers)} <= {*_CODES}:
            made = NumberLayout(value, members)
    elif (spec := spec_of(value)) is not None and spec.device == "cpu" and spec.nbytes:
        made = ArrayLayout(spec, members)
    return made if made is not None and len(made.data) <= _LONGEST else None


def read_layout(data: bytes, members: int) -> Layout:
    """Return the layout that another member's `data` describes."""
    specs: list[Spec] = []
    value = codec.decode(data, allow_pickle=False, out_of_band=specs.append)
    return ArrayLayout(specs[0], members) if specs else NumberLayout(value, members)


class Layout(ABC):
    """The places of the values of all members, for values of one shape."""

    #: What the value is: its encoding, with zeros for numbers, and for an array only its spec.
    data: bytes
    stride: int  #: bytes of a slot
    #: Returns what :meth:`write` writes; None if this value does not fit.
    pack: Callable[[Any], Any]

    def __init__(self) -> None:
        self.notes: dict[int, tuple[Note, Note]] = {}  #: a plain note's id: it, and that with data
        #: Where the slots are; None until that is known, and where notes carry them.
        self.window: Window | None = None
        self.half = 0  #: bytes of it for one round
        self.is_placed = False
        self.one_round = True  #: a reduction takes one round, and not one for each piece

    @abstractmethod
    def to_bytes(self, packed: Any) -> bytes:
        """Return the contents of a slot."""

    @abstractmethod
    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`; the first slot is at `at`."""

    @abstractmethod
    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`: in `out`, if that is an array."""

    @abstractmethod
    def fits(self, out: Any) -> bool:
        """Return whether :meth:`read` can fill `out`."""

    @abstractmethod
    def place_for(self, op: str, out: Any) -> Any:
        """Return the array for the reduction: `out` if it fits. None for numbers.

        :raises TypeError: if `op` cannot reduce such values.
        """

    @abstractmethod
    def reduce(self, memory: Memory, at: int, op: str, place: Any) -> Any:
        """Return the reduction of all slots, in rank order; an array in `place`."""


class NumberLayout(Layout):
    """A float, an int of 64 bits, or a flat dict, list or tuple of them."""

    def __init__(self, value: Any, members: int) -> None:
        super().__init__()
        kind = type(cast("object", value))
        self._kind: Any = kind
        self._keys = tuple(value) if kind is dict else ()
        of_container: Any = cast("Any", dict).values if kind is dict else _itself
        self._numbers: Any = _alone if kind in _CODES else of_container
        numbers = list(self._numbers(value))
        zeros = [type(number)() for number in numbers]
        self.data = codec.encode(self._build(zeros))
        self._width = width = len(numbers)
        codes = "".join(_CODES[type(number)] for number in numbers)
        self._one, self._all = struct.Struct(f"<{codes}"), struct.Struct(f"<{codes * members}")
        # A slot holds the numbers and their checksum: a damaged one is never a wrong result.
        self.stride = _up(8 * width + _CRC)
        slot = f"{8 * width}sI{self.stride - 8 * width - _CRC}x"
        self._slot, self._slots = struct.Struct(f"<{slot}"), struct.Struct(f"<{slot * members}")
        self.pack = self._pack

    def _build(self, numbers: Sequence[Any]) -> Any:
        if self._kind in _CODES:
            return numbers[0]
        return dict(zip(self._keys, numbers, strict=True)) if self._keys else self._kind(numbers)

    def _pack(self, value: Any) -> bytes | None:
        """Return the bytes of the slot; None if an int has more than 64 bits."""
        try:
            body = self._one.pack(*self._numbers(value))
        except struct.error:
            return None
        return self._slot.pack(body, crc32(body))

    def _unpack(
        self, numbers: struct.Struct, slots: struct.Struct, memory: Memory, at: int
    ) -> Sequence[Any]:
        """Return the `numbers` in the `slots` at `at`.

        :raises EncodingError: if those of a slot do not have their checksum.
        """
        bodies: list[bytes] = []  # copies: what is checked is what is used
        found = iter(slots.unpack_from(memory, at))
        for body in found:
            if crc32(body) != next(found):
                raise EncodingError(
                    f"the {self._width} numbers of a rank do not have their checksum: the memory "
                    f"that the ranks share was damaged. Start the job again; if it happens again, "
                    f"test the memory of this host"
                )
            bodies.append(body)
        return numbers.unpack(b"".join(bodies))

    def to_bytes(self, packed: Any) -> bytes:
        """Return the contents of a slot."""
        data: bytes = packed
        return data

    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`."""
        at += index * self.stride
        memory[at : at + self.stride] = packed

    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`."""
        at += index * self.stride
        return self._build(self._unpack(self._one, self._slot, memory, at))

    def fits(self, out: Any) -> bool:
        """Return False: numbers are made."""
        return False

    def place_for(self, op: str, out: Any) -> None:
        """Return None: every `op` can reduce numbers."""

    def reduce(self, memory: Memory, at: int, op: str, place: Any) -> Any:
        """Return the reduction of all slots."""
        numbers, width = self._unpack(self._all, self._slots, memory, at), self._width
        if self._kind in _CODES:
            return reduction.reduce_numbers(numbers, op)
        return self._build([reduction.reduce_numbers(numbers[i::width], op) for i in range(width)])


class ArrayLayout(Layout):
    """An array, or a tensor in the memory of its host."""

    def __init__(self, spec: Spec, members: int) -> None:
        super().__init__()
        self.spec = spec
        self.data = codec.encode_spec(spec)
        self.stride = _up(spec.nbytes)
        self._members = members
        self._dtype = spec.loaded_dtype
        library: Any = sys.modules[spec.library]
        self._kind = library.ndarray if spec.library == "numpy" else library.Tensor
        # Of shared memory, by where it begins: one slot, and those of all members.
        self._slots: dict[int, Any] = {}
        self._rows: dict[int, list[Any]] = {}
        self._dtypes: dict[str, Any] = {}  # of the reductions that are possible
        # The items of an array: the very memory, where that is contiguous.
        self.pack = _itself if spec.library == "numpy" else flat

    def to_bytes(self, packed: Any) -> bytes:
        """Return the contents of a slot."""
        return raw(flat(packed)).tobytes().ljust(self.stride, b"\0")

    def _slots_at(self, memory: Memory, at: int) -> list[Any]:
        """Return the items in each slot, of the kind that :meth:`pack` returns."""
        found = self._rows.get(at)
        if found is None or isinstance(memory, bytearray):
            begins = range(at, at + self._members * self.stride, self.stride)
            found = [self._slot(memory, begin) for begin in begins]
            if not isinstance(memory, bytearray):
                self._rows[at] = found
        return found

    def _slot_at(self, memory: Memory, at: int) -> Any:
        """Return the items in one slot."""
        found = self._slots.get(at)
        if found is None or isinstance(memory, bytearray):
            found = self._slot(memory, at)
            if not isinstance(memory, bytearray):
                self._slots[at] = found
        return found

    def _slot(self, memory: Memory, at: int) -> Any:
        """Return the items in the slot that begins at `at`."""
        dtype = self._dtype
        count = self.spec.nbytes // int(dtype.itemsize)
        if self.spec.library == "numpy":
            import numpy

            return numpy.frombuffer(memory, dtype, count, at).reshape(self.spec.shape)
        import torch

        return flat(torch.frombuffer(memory, dtype=dtype, count=count, offset=at))

    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`."""
        self._slot_at(memory, at + index * self.stride)[...] = packed

    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`."""
        value = self.spec.make() if out is None else out
        self.pack(value)[...] = self._slot_at(memory, at + index * self.stride)
        return value

    def fits(self, out: Any) -> bool:
        """Return whether :meth:`read` can fill `out`."""
        return self._fits(out, self._dtype)

    def _fits(self, out: Any, dtype: Any) -> bool:
        if type(out) is not self._kind or out.dtype != dtype or out.shape != self.spec.shape:
            return False
        if self.spec.library == "torch" and not (out.is_cpu and str(out.layout) == "torch.strided"):
            return False
        return is_fillable(out)

    def place_for(self, op: str, out: Any) -> Any:
        """Return the array for the reduction: `out` if it fits."""
        dtype = self._dtypes.get(op)
        if dtype is None:
            like = self.spec.make()
            reduction.check_value(like, op)
            dtype = self._dtypes[op] = reduction.result_dtype(like, op)
        if out is not None and self._fits(out, dtype):
            return out
        if self.spec.library == "numpy":
            import numpy

            return numpy.empty(self.spec.shape, dtype)
        import torch

        return torch.empty(self.spec.shape, dtype=dtype, device="cpu")

    def reduce(self, memory: Memory, at: int, op: str, place: Any) -> Any:
        """Return the reduction of all slots in `place`."""
        items = self.pack(place)
        reduction.combine(self._slots_at(memory, at), op, items)
        reduction.set_nans(items)
        return place


def _itself(value: Any) -> Any:
    return value


def _alone(number: Any) -> tuple[Any]:
    return (number,)


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE
