"""Layouts of values, in slots of shared memory or in an engine, made once for each shape.

A training loop makes the same calls again and again with new numbers. What stays the same is made
once: the description of the value, which travels as a part of the note's label, and the views of
all members' slots. Numbers, arrays, and flat containers of them have a layout.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, cast
from zlib import crc32

from syncprims.errors import EncodingError

from . import LONGEST_DESCRIPTION, Array, DType, Out, Value, arrays, codec, reduction
from .arrays import Spec, flat, mark_written, spec_of

#: ``reduce(memory, at, out)`` returns the reduction, in the order of ranks, of slots of which
#: the first is at `at`. An array is in `out`, if it fits.
Reducer = Callable[[memoryview, int, Any], Any]

_MOST_PARTS = 64  # of one container
#: How `struct` writes a number, by its kind, in 8 bytes: kinds that mix have slots of one size.
_CODES: dict[type, str] = {float: "d", int: "q", bool: "?7x"}
_CONTAINERS = frozenset((dict, list, tuple))


def key_of(value: object) -> Hashable:
    """Return the facts that all values of one layout share; None for most values without one."""
    kind = type(value)
    of_kind = _KEYS.get(kind)
    if of_kind is not None:
        try:
            return of_kind(value)
        except RuntimeError:  # a nested tensor has no shape, and a sparse one no strides
            return None
    library = arrays.library_of(value)
    if library is None:
        return None
    # Read in one step: each step takes longer than reading one attribute more.
    more = ("device", "layout", "requires_grad") if library == "torch" else ()
    read = attrgetter("dtype", "shape", *more)
    _KEYS[kind] = read if library == "numpy" else lambda tensor: (*read(tensor), tensor.stride())
    return key_of(value)


def _key_of_dict(value: dict[Any, Any]) -> Hashable:
    parts = _keys_of_parts(value.values())
    return None if parts is None else (dict, *value, *map(type, value), *parts)


def _key_of_sequence(value: list[Any] | tuple[Any, ...]) -> Hashable:
    parts = _keys_of_parts(value)
    return None if parts is None else (type(value), *parts)


def _keys_of_parts(parts: Collection[Any]) -> Sequence[Hashable] | None:
    if not 0 < len(parts) <= _MOST_PARTS:
        return None
    kinds = [*map(type, parts)]
    for kind in kinds:
        if kind not in _CODES:
            break
    else:
        return kinds
    keys = [None if type(part) in _CONTAINERS else key_of(part) for part in parts]
    return None if None in keys else keys


#: By the type of a value; those of numpy and torch are added when they are needed.
_KEYS: dict[type, Callable[[Any], Hashable]] = {
    float: type,
    int: type,
    bool: type,
    dict: _key_of_dict,
    list: _key_of_sequence,
    tuple: _key_of_sequence,
}


def make_layout(value: Value, members: int, most: int) -> Layout | None:
    """Return the layout of values like this one, which has a key; None if they have none.

    A container of arrays with more than `most` bytes has none.
    """
    kind = type(cast("object", value))
    if kind not in _CONTAINERS:
        outline = _outline_of(value)
    else:
        container = _Container(value)
        parts = [*map(_outline_of, container.parts(value))]
        if sum(getattr(part, "nbytes", 0) for part in parts) > most:
            return None
        named = {*map(type, value if kind is dict else ())} <= {str}
        outline = container.build(parts) if named and None not in parts else None
    layout = None if outline is None else _layout_of(outline, members)
    return layout if layout is not None and len(layout.data) <= LONGEST_DESCRIPTION else None


def _outline_of(value: Value) -> Any:
    """Return the fact that all values of one layout share: 0 for a number, an array's spec."""
    kind = type(cast("object", value))
    if kind in _CODES:
        return kind()
    spec = spec_of(value)
    return spec if spec is not None and spec.device == "cpu" and spec.nbytes else None


def read_layout(data: bytes, members: int) -> Layout:
    """Return the layout that another member's `data` describes."""
    return _layout_of(codec.decode(data, allow_pickle=False, out_of_band=_itself), members)


def _layout_of(outline: Value, members: int) -> Layout:
    if isinstance(outline, Spec):
        return ArrayLayout(outline, members)
    parts = _Container(outline).parts(outline) if type(outline) in _CONTAINERS else [outline]
    are_numbers = _CODES.keys() >= {*map(type, parts)}
    return NumberLayout(outline, members) if are_numbers else TreeLayout(outline, members)


class _Container:
    """A flat dict, list or tuple: how it is taken apart, and made of its parts again."""

    def __init__(self, like: Array) -> None:
        self._kind: Any = type(like)
        self._keys = tuple(like) if self._kind is dict else ()
        of_dict: Any = cast("Any", dict).values
        self.parts: Callable[[Any], Collection[Any]] = of_dict if self._kind is dict else _itself

    def build(self, parts: Sequence[Any]) -> Any:
        """Return such a container of these parts."""
        return dict(zip(self._keys, parts, strict=True)) if self._keys else self._kind(parts)


class Layout(ABC):
    """The slots of all members, for values of one shape."""

    data: bytes  #: the description of the value: a part of the label of a note
    stride: int  #: bytes from one slot to the next
    #: Returns what :meth:`write` writes; None if this value does not fit.
    pack: Callable[[Any], Any]

    def spread(self, stride: int) -> None:
        """Set the bytes from one slot to the next."""
        self.stride = stride

    @abstractmethod
    def write(self, memory: memoryview, at: int, packed: Value) -> None:
        """Write the slot at `at`."""

    @abstractmethod
    def read(self, memory: memoryview, at: int, out: Out = None) -> Any:
        """Return the value in the slot at `at`: in `out`, if that is an array."""

    def fits(self, out: Out) -> bool:
        """Return whether :meth:`read` can fill `out`; else it makes the value."""
        return False

    @abstractmethod
    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`."""


class NumberLayout(Layout):
    """A number of at most 64 bits, or a flat dict, list or tuple of numbers."""

    def __init__(self, outline: Value, members: int) -> None:
        """`outline` is such a value of zeros."""
        self.data = codec.encode(outline)
        is_alone = type(outline) not in _CONTAINERS
        container = _Container([outline] if is_alone else outline)
        self._build = itemgetter(0) if is_alone else container.build
        self._numbers: Any = _alone if is_alone else container.parts
        self._is_alone = is_alone
        kinds: list[Any] = [*map(type, self._numbers(outline))]
        codes = "".join(_CODES[kind] for kind in kinds)
        self._members, self._width = members, len(kinds)
        self._one, self._all = struct.Struct(f"<{codes}"), struct.Struct(f"<{codes * members}")
        # A slot holds the numbers and their checksum: a damaged one is never a wrong result.
        self._contents = f"{8 * self._width}sI"
        self._slot = struct.Struct(f"<{self._contents}")
        self.spread(self._slot.size)

    def spread(self, stride: int) -> None:
        """Set the bytes from one slot to the next."""
        super().spread(stride)
        gap = f"{stride - self._slot.size}x"
        self._slots = struct.Struct(f"<{gap.join([self._contents] * self._members)}")

    def pack(self, value: Value) -> bytes | None:
        """Return the bytes of the slot; None if an int has more than 64 bits."""
        try:
            body = self._one.pack(*self._numbers(value))
        except struct.error:
            return None
        return self._slot.pack(body, crc32(body))

    def _unpack(
        self, numbers: struct.Struct, slots: struct.Struct, memory: memoryview, at: int
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

    def write(self, memory: memoryview, at: int, packed: Value) -> None:
        """Write the slot at `at`."""
        memory[at : at + len(packed)] = packed

    def read(self, memory: memoryview, at: int, out: Out = None) -> Any:
        """Return the value in the slot at `at`."""
        return self._build(self._unpack(self._one, self._slot, memory, at))

    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`."""
        return partial(self._reduce, op)

    def _reduce(self, op: str, memory: memoryview, at: int, _: object) -> Any:
        numbers, width = self._unpack(self._all, self._slots, memory, at), self._width
        if self._is_alone:
            return reduction.reduce_numbers(numbers, op)
        return self._build([reduction.reduce_numbers(numbers[i::width], op) for i in range(width)])


class ArrayLayout(Layout):
    """An array, or a tensor in the memory of its host."""

    def __init__(self, spec: Spec, members: int) -> None:
        self.spec, self._plain = spec, spec._replace(strides=())
        self.data = codec.encode(spec)
        self.stride = arrays.up_to_line(spec.nbytes)
        self._members = members
        self._dtype = spec.loaded_dtype
        self._library = sys.modules[spec.library]
        self._is_tensor = spec.library == "torch"
        self._kind = self._library.Tensor if self._is_tensor else self._library.ndarray
        device = {"device": "cpu"} if self._is_tensor else {}
        self._empty = partial(self._library.empty, spec.shape, **device)
        #: Returns a contiguous array with the strides of the values.
        self.lay_out = partial(arrays.laid_out, strides=spec.strides) if spec.strides else _itself
        self._slots: dict[int, Any] = {}  # the items of one slot, by where it begins
        self._rows: dict[int, list[Any]] = {}  # and of those of all members
        known = arrays.numpy_dtype(self._dtype) if self._is_tensor else self._dtype
        self._is_known = known is not None  # to numpy; if it is not, a slot holds bytes for it
        #: Returns the items of an array: the very memory, where that is contiguous.
        self.pack = (flat if self._is_known else _octets) if self._is_tensor else _itself
        self._slot_dtype = known or arrays.numpy_dtype(self._library.uint8)

    def _slot_at(self, memory: memoryview, at: int) -> Any:
        """Return the items in one slot, of the kind that :attr:`pack` returns."""
        slot = self._slots.get(at)
        if slot is None:
            import numpy

            dtype, shape = self._slot_dtype, self.spec.shape
            if self._is_tensor:
                shape = (self.spec.nbytes // int(dtype.itemsize),)
            slot = numpy.ndarray(shape, dtype, memory, at)
            self._slots[at] = slot
        return slot

    def _rows_at(self, memory: memoryview, at: int) -> list[Any]:
        """Return the items in each slot; the first slot is at `at`."""
        rows = self._rows.get(at)
        if rows is None:
            begins = range(at, at + self._members * self.stride, self.stride)
            rows = [self._slot_at(memory, begin).reshape(-1) for begin in begins]
            if not self._is_known:
                rows = [self._library.from_numpy(row).view(self._dtype) for row in rows]
            self._rows[at] = rows
        return rows

    def write(self, memory: memoryview, at: int, packed: Value) -> None:
        """Write the slot at `at`."""
        self._slot_at(memory, at)[...] = packed

    def read(self, memory: memoryview, at: int, out: Out = None) -> Any:
        """Return the value in the slot at `at`: in `out`, if that is an array."""
        value = self._plain.make() if out is None else out
        self.pack(value)[...] = self._slot_at(memory, at)
        return value if out is not None else self.lay_out(value)

    def fits(self, out: Out) -> bool:
        """Return whether `out` is such an array, and can be written to."""
        return self._can_fill(self._dtype, out)

    def _can_fill(self, dtype: DType, out: Out) -> bool:
        if type(out) is not self._kind or out.dtype != dtype or out.shape != self.spec.shape:
            return False
        if not self._is_tensor:
            return bool(out.flags.carray)
        return bool(out.is_cpu and out.layout is self._library.strided and arrays.is_fillable(out))

    def room_for(self, op: str, out: Out) -> Any:
        """Return a contiguous array for the result of `op`: `out`, if it fits."""
        dtype = reduction.result_dtype(self._dtype, op)
        return out if out is not None and self._can_fill(dtype, out) else self._empty(dtype=dtype)

    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`, into a new array or into `out`."""
        dtype = reduction.result_dtype(self._dtype, op)

        combine: Callable[[Sequence[Any], Any], None] = partial(reduction.combine, op=op)
        if self._is_known:
            items_dtype = arrays.numpy_dtype(dtype) if self._is_tensor else dtype
            combine = reduction.array_combiner(op, items_dtype, self._slot_dtype)

        def reduce(memory: memoryview, at: int, out: Out) -> Any:
            result = self._empty(dtype=dtype) if out is None else self.room_for(op, out)
            if self._is_tensor:
                combine(self._rows_at(memory, at), flat(result))
                mark_written(result)
            else:
                combine(self._rows_at(memory, at), result.reshape(-1))
            return result if result is out else self.lay_out(result)

        return reduce


class TreeLayout(Layout):
    """A flat dict, list or tuple of small arrays and numbers: a part of the slot for each."""

    def __init__(self, outline: Value, members: int) -> None:
        """`outline` is such a container of zeros and specs."""
        self.data = codec.encode(outline)
        self.stride = 0
        self._container = container = _Container(outline)
        self._parts: list[tuple[int, Layout]] = []  # each with where it begins in a slot
        for part in container.parts(outline):
            layout = _layout_of(part, members)
            self._parts.append((self.stride, layout))
            self.stride += arrays.up_to_line(layout.stride)

    def spread(self, stride: int) -> None:
        """Set the bytes from one slot to the next."""
        super().spread(stride)
        for _, layout in self._parts:
            layout.spread(stride)

    def pack(self, value: Value) -> list[Any] | None:
        """Return what :meth:`write` writes; None if an int has more than 64 bits."""
        pairs = zip(self._parts, self._container.parts(value), strict=True)
        packed = [layout.pack(part) for (_, layout), part in pairs]
        return None if any(one is None for one in packed) else packed

    def write(self, memory: memoryview, at: int, packed: Value) -> None:
        """Write the slot at `at`."""
        for (begin, layout), part in zip(self._parts, packed, strict=True):
            layout.write(memory, at + begin, part)

    def read(self, memory: memoryview, at: int, out: Out = None) -> Any:
        """Return the value in the slot at `at`."""
        parts = [layout.read(memory, at + begin) for begin, layout in self._parts]
        return self._container.build(parts)

    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`, part by part."""
        reducers = [(begin, layout.reducer(op)) for begin, layout in self._parts]

        def reduce(memory: memoryview, at: int, _: object) -> Any:
            parts = [reduce_part(memory, at + begin, None) for begin, reduce_part in reducers]
            return self._container.build(parts)

        return reduce


def _octets(tensor: Array) -> Any:
    import numpy

    return numpy.frombuffer(arrays.raw(flat(tensor)), numpy.uint8)


def _itself(value: Value) -> Any:
    return value


def _alone(number: Value) -> tuple[Any]:
    return (number,)
