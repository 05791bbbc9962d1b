"""Where the numbers of a value lie in memory: prepared once for all values of one shape.

A training loop makes the same calls again and again with new numbers. What stays the same is made
once: the description of the value, which travels as a part of the note's label, and the places of
all members' numbers. They lie side by side, one *slot* per member.
"""

from __future__ import annotations

import struct
import sys
from abc import ABC, abstractmethod
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from zlib import crc32

from syncprims.errors import EncodingError

from . import codec, reduction
from .arrays import (
    Spec,
    flat,
    is_fillable,
    library_of,
    mark_written,
    numpy_dtype,
    raw,
    spec_of,
    up_to_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from syncprims.interface import Window

    Memory = memoryview | bytearray

_CRC = 4  # bytes
_MOST_PARTS = 64  # of one container
_MOST_OF_TREES = 256 << 10  # bytes in all slots, which so take one round
_LONGEST = 1024  # bytes of a description: a label has to fit into a cell
#: How `struct` writes a number, by its kind, in 8 bytes: kinds that mix have slots of one size.
_CODES: dict[type, str] = {float: "d", int: "q", bool: "?7x"}
#: Those of numpy, by their names; they are added to the others when they are needed.
_CODES_OF_NUMPY = {
    "float64": "d", "float32": "f4x", "bool": "?7x", "bool_": "?7x",
    "int64": "q", "int32": "i4x", "int16": "h6x", "int8": "b7x",
    "uint64": "Q", "uint32": "I4x", "uint16": "H6x", "uint8": "B7x",
}  # fmt: skip
_PYTHONS = frozenset(_CODES)
_CONTAINERS = frozenset((dict, list, tuple))


def key_of(value: object) -> Hashable:
    """Return what is the same for all values of one layout; None for most that have none."""
    kind = type(value)
    of_kind = _KEYS.get(kind)
    if of_kind is not None:
        return of_kind(value)
    library = library_of(value)
    if _is_number(kind):
        _KEYS[kind] = type
    elif library is None:
        return None
    else:
        # In one step for all of them, as most of the time of it is that of a step.
        names = ("dtype", "shape") + (
            ("device", "layout", "requires_grad") if library == "torch" else ()
        )
        _KEYS[kind] = attrgetter(*names)
    return _KEYS[kind](value)


def _key_of_dict(value: dict[Any, Any]) -> Hashable:
    parts = _keys_of_parts(value.values())
    return None if parts is None else (dict, *value, *map(type, value), *parts)


def _key_of_sequence(value: list[Any] | tuple[Any, ...]) -> Hashable:
    parts = _keys_of_parts(value)
    return None if parts is None else (type(value), *parts)


def _keys_of_parts(parts: Collection[Any]) -> Sequence[Hashable] | None:
    if len(parts) > _MOST_PARTS:
        return None
    kinds = [*map(type, parts)]
    for kind in kinds:
        if kind not in _CODES:
            break
    else:
        return kinds
    keys = [*map(key_of, parts)] if _CONTAINERS.isdisjoint(kinds) else [None]
    return None if None in keys else keys


#: By the type of a value; those of numpy and torch when they are needed.
_KEYS: dict[type, Callable[[Any], Hashable]] = {
    float: type,
    int: type,
    bool: type,
    dict: _key_of_dict,
    list: _key_of_sequence,
    tuple: _key_of_sequence,
}


def _is_number(kind: type) -> bool:
    """Return whether numbers of this kind have a place in a slot."""
    if kind not in _CODES and kind.__module__ == "numpy":
        name = kind.__name__
        if name in _CODES_OF_NUMPY and getattr(sys.modules["numpy"], name, None) is kind:
            _CODES[kind] = _CODES_OF_NUMPY[name]
    return kind in _CODES


def make_layout(value: Any, members: int) -> Layout | None:
    """Return the layout of values like this one; None if they have none."""
    outline = _outline_of_leaf(value)
    if outline is None and type(cast("object", value)) in _CONTAINERS:
        outline = _outline_of_container(value)
    made = None if outline is None else _layout_of(outline, members)
    if made is None or len(made.data) > _LONGEST:
        return None
    is_tree = isinstance(made, TreeLayout)
    return None if is_tree and made.stride * members > _MOST_OF_TREES else made


def read_layout(data: bytes, members: int) -> Layout:
    """Return the layout that another member's `data` describes."""
    return _layout_of(codec.decode(data, allow_pickle=False, out_of_band=_itself), members)


def _outline_of_leaf(value: Any) -> Any:
    """Return what is the same for all values of one layout: 0 for a number, an array's spec."""
    kind: Any = type(cast("object", value))
    if _is_number(kind):
        return kind()
    spec = spec_of(value)
    return spec if spec is not None and spec.device == "cpu" and spec.nbytes else None


def _outline_of_container(value: Any) -> Any:
    container = _Container(value)
    parts = [*map(_outline_of_leaf, container.parts(value))]
    if not parts or None in parts or not {*map(type, container.keys)} <= {str}:
        return None
    # A large array in a container travels by itself.
    is_large = any(isinstance(part, Spec) and part.nbytes >= codec.LARGE for part in parts)
    return None if is_large else container.build(parts)


def _layout_of(outline: Any, members: int) -> Layout:
    if isinstance(outline, Spec):
        return ArrayLayout(outline, members)
    is_alone = type(outline) not in _CONTAINERS
    parts = [outline] if is_alone else _Container(outline).parts(outline)
    if all(_is_number(type(cast("object", part))) for part in parts):
        return NumberLayout(outline, members)
    return TreeLayout(outline, members)


class _Container:
    """A flat dict, list or tuple: how it is taken apart, and made of its parts again."""

    def __init__(self, like: Any) -> None:
        self._kind: Any = type(like)
        self.keys = tuple(like) if self._kind is dict else ()
        of_dict: Any = cast("Any", dict).values
        self.parts: Callable[[Any], Collection[Any]] = of_dict if self._kind is dict else _itself

    def build(self, parts: Sequence[Any]) -> Any:
        """Return such a container of these parts."""
        return dict(zip(self.keys, parts, strict=True)) if self.keys else self._kind(parts)


class Layout(ABC):
    """The places of the values of all members, for values of one shape."""

    data: bytes  #: what the value is: the encoding of its outline
    stride: int  #: bytes from one slot to the next
    #: Returns what :meth:`write` writes; None if this value does not fit.
    pack: Callable[[Any], Any]

    def __init__(self) -> None:
        #: Where the slots are; None until that is known, and where notes carry them.
        self.window: Window | None = None
        self.half = 0  #: bytes of it for one round
        self.is_placed = False
        self.one_round = True  #: a reduction takes one round, and not one for each piece
        self.is_large = False  #: a single array that, without a layout, travels out of band

    def to_bytes(self, packed: Any) -> bytes:
        """Return the contents of a slot."""
        memory = bytearray(self.stride)
        self.write(memory, 0, 0, packed)
        return bytes(memory)

    def widen(self, stride: int) -> None:
        """Set the distance of slots, in bytes: this layout is a part of a larger one."""
        self.stride = stride

    @abstractmethod
    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`; the first slot is at `at`."""

    @abstractmethod
    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`: in `out`, if that is an array."""

    def fits(self, out: Any) -> bool:
        """Return whether :meth:`read` can fill `out`; else it makes the value."""
        return False

    @abstractmethod
    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`, which can reduce such values."""


class Reducer(NamedTuple):
    """How the values in all slots become one, for one layout and one `op`."""

    #: ``place_for(out)`` returns the array for the result: `out` if it fits. None for numbers.
    place_for: Callable[[Any], Any]
    #: ``reduce(memory, at, place)`` returns the reduction, in rank order, of slots of which the
    #: first is at `at`. An array is in `place`.
    reduce: Callable[[Memory, int, Any], Any]


class NumberLayout(Layout):
    """A number of at most 64 bits, or a flat dict, list or tuple of numbers."""

    def __init__(self, outline: Any, members: int) -> None:
        super().__init__()
        self.data = codec.encode(outline)
        self._is_alone = type(outline) not in _CONTAINERS
        container = _Container([outline] if self._is_alone else outline)
        self._build = itemgetter(0) if self._is_alone else container.build
        self._numbers: Any = _alone if self._is_alone else container.parts
        self._kinds: list[Any] = [type(zero) for zero in self._numbers(outline)]
        self._are_pythons = _PYTHONS.issuperset(self._kinds)
        codes = "".join(_CODES[kind] for kind in self._kinds)
        self._members, self._width = members, len(self._kinds)
        self._one, self._all = struct.Struct(f"<{codes}"), struct.Struct(f"<{codes * members}")
        # A slot holds the numbers and their checksum: a damaged one is never a wrong result.
        self._contents = f"{8 * self._width}sI"
        self._slot = struct.Struct(f"<{self._contents}")
        self.widen(up_to_line(self._slot.size))
        self.pack = self._pack

    def widen(self, stride: int) -> None:
        """Set the distance of slots, in bytes: this layout is a part of a larger one."""
        super().widen(stride)
        gap = f"{stride - self._slot.size}x"
        self._slots = struct.Struct(f"<{gap.join([self._contents] * self._members)}")

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

    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`."""
        at += index * self.stride
        memory[at : at + len(packed)] = packed

    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`."""
        at += index * self.stride
        numbers = self._unpack(self._one, self._slot, memory, at)
        if not self._are_pythons:
            pairs = zip(self._kinds, numbers, strict=True)
            numbers = [kind(number) for kind, number in pairs]
        return self._build(numbers)

    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`; each can reduce numbers."""

        def reduce(memory: Memory, at: int, _: Any) -> Any:
            return self.reduce(memory, at, op)

        return Reducer(_no_array, reduce)

    def reduce(self, memory: Memory, at: int, op: str) -> Any:
        """Return the reduction of all slots."""
        numbers, width = self._unpack(self._all, self._slots, memory, at), self._width
        if self._are_pythons:
            if self._is_alone:
                return reduction.reduce_numbers(numbers, op)
            return self._build(
                [reduction.reduce_numbers(numbers[i::width], op) for i in range(width)]
            )
        kinds = enumerate(self._kinds)
        return self._build(
            [reduction.reduce_kind(kind, numbers[i::width], op) for i, kind in kinds]
        )


class ArrayLayout(Layout):
    """An array, or a tensor in the memory of its host."""

    def __init__(self, spec: Spec, members: int) -> None:
        super().__init__()
        self.spec = spec
        self.data = codec.encode(spec)
        self.stride = up_to_line(spec.nbytes)
        self.is_large = spec.nbytes >= codec.LARGE
        self._members = members
        self._dtype = spec.loaded_dtype
        self.library: Any = sys.modules[spec.library]
        self._kind = self.library.ndarray if spec.library == "numpy" else self.library.Tensor
        # Of shared memory, by where it begins: one slot, and those of all members.
        self._slots: dict[int, Any] = {}
        self._rows: dict[int, list[Any]] = {}
        # The items of an array: the very memory, where that is contiguous.
        self.pack = _itself
        self._slot_dtype, self._slot_shape = self._dtype, spec.shape
        #: Whether numpy has the dtype. If not, it sees bytes in a slot.
        self.is_known = True
        if spec.library == "torch":
            known = numpy_dtype(self._dtype)
            self.is_known = known is not None
            self.pack = flat if self.is_known else _octets
            self._slot_dtype = known or numpy_dtype(self.library.uint8)
            self._slot_shape = (spec.nbytes // int(self._slot_dtype.itemsize),)

    def slots_at(self, memory: Memory, at: int) -> list[Any]:
        """Return the items in each slot, in one dimension; the first slot is at `at`."""
        found = self._rows.get(at)
        if found is None:
            begins = range(at, at + self._members * self.stride, self.stride)
            found = [self._slot(memory, begin).reshape(-1) for begin in begins]
            if not self.is_known:
                found = [self.library.from_numpy(slot).view(self._dtype) for slot in found]
            if not isinstance(memory, bytearray):
                self._rows[at] = found
        return found

    def _slot_at(self, memory: Memory, at: int) -> Any:
        """Return the items in one slot, of the kind that :meth:`pack` returns."""
        found = self._slots.get(at)
        if found is None:
            found = self._slot(memory, at)
            if not isinstance(memory, bytearray):
                self._slots[at] = found
        return found

    def _slot(self, memory: Memory, at: int) -> Any:
        import numpy

        return numpy.ndarray(self._slot_shape, self._slot_dtype, memory, at)

    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`."""
        at += index * self.stride
        slot = self._slots.get(at)
        if slot is None:
            slot = self._slot_at(memory, at)
        slot[...] = packed

    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`."""
        value = self.spec.make() if out is None else out
        self.pack(value)[...] = self._slot_at(memory, at + index * self.stride)
        return value

    def fits(self, out: Any) -> bool:
        """Return whether :meth:`read` can fill `out`."""
        return self.can_fill(out, self._dtype)

    def can_fill(self, out: Any, dtype: Any) -> bool:
        """Return whether `out` is such an array, but of `dtype`, and can be written to."""
        if type(out) is not self._kind or out.dtype != dtype or out.shape != self.spec.shape:
            return False
        if self.spec.library == "numpy":
            return bool(out.flags.carray)
        return bool(out.is_cpu and out.layout is self.library.strided and is_fillable(out))

    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`."""
        made = ArrayReducer(self, op)
        return Reducer(made.place_for, made.reduce)


class ArrayReducer:
    """Reduces arrays into a new one, or into the caller's."""

    def __init__(self, layout: ArrayLayout, op: str) -> None:
        spec = layout.spec
        like = spec.make()
        self._layout, self._is_tensor = layout, spec.library == "torch"
        dtype = self._dtype = reduction.result_dtype(like, op)
        self._empty: Callable[[], Any]
        if self._is_tensor:
            self._empty = partial(layout.library.empty, spec.shape, dtype=dtype, device="cpu")
        else:
            self._empty = partial(layout.library.empty, spec.shape, dtype)
        self._items = flat if self._is_tensor else _flattened
        part, items = self._items(like), self._items(self._empty())
        self._combine: Callable[[Sequence[Any], Any], object]
        if layout.is_known:
            self._combine = reduction.array_combiner(op, items.dtype, part.dtype)
        else:
            self._combine = lambda parts, items: reduction.combine(parts, op, items)

    def place_for(self, out: Any) -> Any:
        """Return `out` if it fits, else a new array."""
        if out is not None and self._layout.can_fill(out, self._dtype):
            return out
        return self._empty()

    def reduce(self, memory: Memory, at: int, place: Any) -> Any:
        """Return the reduction of all slots, in `place`."""
        items = self._items(place)
        self._combine(self._layout.slots_at(memory, at), items)
        if self._is_tensor:
            mark_written(place)
        return place


class TreeLayout(Layout):
    """A flat dict, list or tuple of small arrays and numbers: a part of the slot for each."""

    def __init__(self, outline: Any, members: int) -> None:
        super().__init__()
        self.data = codec.encode(outline)
        self._container = container = _Container(outline)
        self._build = container.build
        self._parts: list[tuple[int, Layout]] = []  # each with where it begins in a slot
        size = 0
        for part in container.parts(outline):
            layout = _layout_of(part, members)
            self._parts.append((size, layout))
            size += layout.stride
        self.widen(size)
        self.pack = self._pack

    def widen(self, stride: int) -> None:
        """Set the distance of slots, in bytes: this layout is a part of a larger one."""
        super().widen(stride)
        for _, layout in self._parts:
            layout.widen(stride)

    def _pack(self, value: Any) -> list[Any] | None:
        parts = zip(self._parts, self._container.parts(value), strict=True)
        packed = [layout.pack(part) for (_, layout), part in parts]
        return None if any(one is None for one in packed) else packed

    def write(self, memory: Memory, at: int, index: int, packed: Any) -> None:
        """Write the slot of member number `index`."""
        for (begin, layout), part in zip(self._parts, packed, strict=True):
            layout.write(memory, at + begin, index, part)

    def read(self, memory: Memory, at: int, index: int, out: Any = None) -> Any:
        """Return the value in the slot of member number `index`."""
        return self._build(
            [layout.read(memory, at + begin, index) for begin, layout in self._parts]
        )

    def reducer(self, op: str) -> Reducer:
        """Return what reduces all slots with `op`, part by part."""
        parts = [(begin, layout.reducer(op)) for begin, layout in self._parts]

        def places_for(_: Any) -> list[Any]:
            return [part.place_for(None) for _, part in parts]

        def reduce(memory: Memory, at: int, places: list[Any]) -> Any:
            pairs = zip(parts, places, strict=True)
            return self._build([part.reduce(memory, at + b, place) for (b, part), place in pairs])

        return Reducer(places_for, reduce)


def _octets(tensor: Any) -> Any:
    import numpy

    return numpy.frombuffer(raw(flat(tensor)), numpy.uint8)


def _flattened(array: Any) -> Any:
    return array if array.ndim == 1 else array.reshape(-1)


def _no_array(out: Any) -> None:
    """Return None: numbers are made."""


def _itself(value: Any) -> Any:
    return value


def _alone(number: Any) -> tuple[Any]:
    return (number,)
