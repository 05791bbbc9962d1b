"""Objects to bytes and back, without running code: what may travel between ranks.

None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, paths, numpy arrays
and scalars, and CPU tensors have an encoding of their own: a tag byte, then the value. Types are
kept exactly; a subclass is another type. Anything else needs pickle, which the user may forbid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from syncprims._protocol.threads import is_from_signal_handler
from syncprims.errors import TORN, EncodingError

from . import LARGE, Value
from .arrays import Spec, flat, on_host, raw, spec_of

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_DEEPEST = 200  # nested deeper, or in a cycle: left to pickle
_MOST_REPEATS = 10_000
_PICKLES = b"K"  # the first byte of an encoding with a pickle in it
_SIZE = b"W"  # the tag of a size in place of an encoding
_OUT_OF_BAND = b"A"  # the tag of an array that travels by itself

_CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z", dict: b"d"}
_PATHS = {"PosixPath": b"p", "PurePosixPath": b"q"}
_MAKERS: dict[bytes, Callable[[Any], Any]] = {tag: kind for kind, tag in _CONTAINERS.items()}


def encode(
    obj: object, *, allow_pickle: bool = True, out_of_band: list[Any] | None = None
) -> bytes:
    """Return `obj` as bytes.

    With `out_of_band`, large arrays are appended to that list, and only their specs are encoded. A
    :class:`Spec` in `obj` represents such an array, too.

    :raises EncodingError: if a part needs pickle, and pickle is forbidden or cannot do it.
    """
    encoder = _Encoder(allow_pickle, out_of_band)
    try:
        data = encoder.encode(obj)
    except _NeedsPickle:
        if out_of_band is not None:
            out_of_band.clear()  # the pickle holds all
        return _PICKLES + _pickled(obj, allow_pickle)
    return _PICKLES + data if encoder.pickles else data


def holds_pickle(data: bytes) -> bool:
    """Return whether :func:`encode` wrote these bytes with a pickle in them.

    A pickle runs the object's own code where it arrives, so one rank alone may fail to decode it.
    """
    return data[:1] == _PICKLES


def encode_size(size: int) -> bytes:
    """Return what is sent in place of an encoding of this size, which follows as an array of bytes.

    No encoded object begins with the same tag.
    """
    return _SIZE + _LENGTH.pack(size)


def decode_size(data: bytes) -> int | None:
    """Return the size that :func:`encode_size` wrote; None for an encoded object."""
    return int(_LENGTH.unpack(data[1:])[0]) if data[:1] == _SIZE else None


class _NeedsPickle(Exception):
    """A container holds itself, or one seen before, or is nested too deeply."""


def decode(
    data: bytes,
    *,
    allow_pickle: bool = True,
    out_of_band: Callable[[Spec], Any] | None = None,
    local_rank: int = 0,
) -> Any:
    """Return the object that :func:`encode` wrote, with ``out_of_band(spec)`` for such arrays.

    Tensors on devices arrive on the :func:`own_device` of `local_rank`.

    :raises EncodingError: if the bytes hold a pickle and it is forbidden or fails, or are damaged.
    """
    try:
        begin = int(holds_pickle(data))
        obj, end = _Decoder(data, allow_pickle, out_of_band, local_rank).read(begin)
    except EncodingError:
        raise
    except (struct.error, LookupError, ValueError, TypeError, AttributeError) as error:
        raise EncodingError(f"these {len(data)} bytes are not an encoded object: {error}") from None
    except RecursionError:
        raise EncodingError("the encoded object is nested deeper than a rank would send") from None
    if end != len(data):
        raise EncodingError(f"{len(data) - end} bytes follow the encoded object")
    return obj


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + _LENGTH.pack(len(body)) + body


def _number(value: int) -> bytes:
    return _sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


#: How a value is written that has no parts, and one form only.
LEAVES: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _number,
    float: lambda value: b"f" + _FLOAT.pack(value),
    complex: lambda value: b"c" + _COMPLEX.pack(value.real, value.imag),
    str: lambda value: _sized(b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: _sized(b"b", value),
    Spec: lambda spec: _sized(_OUT_OF_BAND, spec.encode()),
}


class _Encoder:
    """Writes one object."""

    def __init__(self, allow_pickle: bool, out_of_band: list[Any] | None) -> None:
        self._allow_pickle = allow_pickle
        self._out_of_band = out_of_band
        self._open: set[int] = set()  # containers that are being written
        self._seen: set[int] = set()  # and that have been: written again, they could be huge
        self._repeats = 0
        self.pickles = False  #: whether a part was pickled

    def encode(self, obj: object, depth: int = 0) -> bytes:
        out: list[bytes] = []
        self._write(obj, out, depth)
        return b"".join(out)

    def _write(self, obj: Value, out: list[bytes], depth: int) -> None:
        kind = type(cast("object", obj))
        leaf = LEAVES.get(kind)
        if leaf is not None:
            out.append(leaf(obj))
        elif depth >= _DEEPEST:
            raise _NeedsPickle
        elif kind in _CONTAINERS:
            self._write_container(kind, obj, out, depth + 1)
        elif kind.__name__ in _PATHS and kind.__module__.startswith("pathlib"):
            body = str(obj).encode("utf-8", "surrogatepass")
            out.append(_sized(_PATHS[kind.__name__], body))
        elif (spec := spec_of(obj)) is not None:
            self._write_array(spec, obj, out)
        elif kind.__module__ == "numpy" and (spec := _spec_of_scalar(obj)) is not None:
            out += (_sized(b"g", spec.encode()), _sized(b"", obj.tobytes()))
        else:
            out.append(_pickled(obj, self._allow_pickle))
            self.pickles = True

    def _write_array(self, spec: Spec, obj: Value, out: list[bytes]) -> None:
        if self._out_of_band is not None and obj.nbytes >= LARGE:
            self._out_of_band.append(obj)
            out.append(_sized(_OUT_OF_BAND, spec.encode()))
        else:
            out += (_sized(b"a", spec.encode()), _sized(b"", raw(flat(on_host(obj))).tobytes()))

    def _write_container(self, kind: type, obj: Value, out: list[bytes], depth: int) -> None:
        key = id(obj)
        if key in self._open:
            raise _NeedsPickle
        if key in self._seen and len(obj):
            if self._allow_pickle:
                raise _NeedsPickle
            self._repeats += 1
            if self._repeats > _MOST_REPEATS:
                raise EncodingError(
                    f"a {kind.__name__} stands in the object more than {_MOST_REPEATS} times, and "
                    f"would be sent as often; send it once"
                )
        self._open.add(key)
        self._seen.add(key)
        out.append(_CONTAINERS[kind] + _LENGTH.pack(len(obj)))
        if kind in (set, frozenset):  # no order of its own, and no two runs give the same
            out += sorted(self.encode(item, depth) for item in obj)
        elif kind is dict:
            for name, value in obj.items():
                self._write(name, out, depth)
                self._write(value, out, depth)
        else:
            for item in obj:
                self._write(item, out, depth)
        self._open.discard(key)


def _spec_of_scalar(obj: Value) -> Spec | None:
    import numpy

    scalar = issubclass(type(obj), numpy.generic)
    return spec_of(numpy.asarray(obj)) if scalar else None


def _pickled(obj: object, allow_pickle: bool) -> bytes:
    kind = f"a {type(obj).__module__}.{type(obj).__qualname__}"
    if not allow_pickle:
        raise EncodingError(
            f"{kind} can only travel as a pickle, and SYNCPRIMS_PICKLE=0 forbids pickle; send it "
            f"as numbers, strings, lists, dicts, arrays or paths, or allow pickle"
        )
    from . import pickling  # slow to import, and rarely needed

    try:
        return _sized(b"P", pickling.dumps(obj))
    except Exception as error:  # pickle calls the object's own methods: they may raise anything
        if is_from_signal_handler(error) or isinstance(error, TORN):  # a collective in a method
            raise
        raise EncodingError(
            f"{kind} cannot travel between ranks: pickle says {type(error).__name__}: {error}"
        ) from error


def _text(body: bytes) -> str:
    return body.decode("utf-8", "surrogatepass")


def _integer(body: bytes) -> int:
    return int.from_bytes(body, "little", signed=True)


#: What most objects are made of: read without a further call.
_TEXTS: dict[bytes, Callable[[bytes], Any]] = {b"i": _integer, b"s": _text, b"b": bytes}
_CONSTANTS: dict[bytes, bool | None] = {b"N": None, b"T": True, b"F": False}


class _Decoder(NamedTuple):
    """Reads one encoded object."""

    data: bytes
    allow_pickle: bool
    out_of_band: Callable[[Spec], Any] | None
    local_rank: int

    def read(self, at: int) -> tuple[Any, int]:
        """Return the object that starts at `at`, and where it ends."""
        data = self.data
        tag = data[at : at + 1]
        at += 1
        leaf = _TEXTS.get(tag)
        if leaf is not None:
            start = at + 8
            end = start + _LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                raise _cut_short(end - len(data))
            return leaf(data[start:end]), end
        if tag in _CONSTANTS:
            return _CONSTANTS[tag], at
        if tag == b"f":
            return _FLOAT.unpack_from(data, at)[0], at + 8
        if tag == b"c":
            return complex(*_COMPLEX.unpack_from(data, at)), at + 16
        (size,) = _LENGTH.unpack_from(data, at)
        at += 8
        if tag in _MAKERS:
            return self._read_container(tag, size, at)
        body, at = _slice(data, at, size)
        if tag in (b"a", b"g"):
            return self._read_array(tag, body, at)
        return self._make_object(tag, body), at

    def _read_container(self, tag: bytes, size: int, at: int) -> tuple[Any, int]:
        items: list[Any] = []
        for _ in range(size if tag != b"d" else 2 * size):
            item, at = self.read(at)
            items.append(item)
        return _MAKERS[tag](items if tag != b"d" else zip(items[::2], items[1::2], strict=True)), at

    def _read_array(self, tag: bytes, header: bytes, at: int) -> tuple[Any, int]:
        (size,) = _LENGTH.unpack_from(self.data, at)
        body, at = _slice(self.data, at + 8, size)
        spec = Spec.decode(header)
        if spec.nbytes != len(body):
            raise ValueError(f"{len(body)} bytes for an array that has {spec.nbytes}")
        array = spec.plain.make()
        raw(flat(array))[:] = body
        array = spec.finish(array, self.local_rank)
        return (array[()] if tag == b"g" else array), at

    def _make_object(self, tag: bytes, body: bytes) -> Any:
        if tag in (b"p", b"q"):
            from pathlib import Path, PurePosixPath

            make_path = Path if tag == b"p" else PurePosixPath
            return make_path(_text(body))
        if tag == _OUT_OF_BAND and self.out_of_band is not None:
            return self.out_of_band(Spec.decode(body))
        if tag != b"P":
            raise EncodingError(f"unknown tag {tag!r}: these bytes are not an encoded object")
        if not self.allow_pickle:
            raise EncodingError("a pickle arrived, and SYNCPRIMS_PICKLE=0 forbids pickle")
        from . import pickling

        try:
            return pickling.loads(body, self.local_rank)
        except Exception as error:  # the object's own code runs here: it may raise anything
            if is_from_signal_handler(error):
                raise
            raise EncodingError(
                f"an object arrived that cannot be made here: {type(error).__name__}: {error}"
            ) from error


def _slice(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise _cut_short(at + size - len(data))
    return data[at : at + size], at + size


def _cut_short(gone: int) -> EncodingError:
    return EncodingError(f"the encoded object was cut short: {gone} bytes gone")
