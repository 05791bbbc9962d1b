"""Compare a value between ranks: first digests, and the objects only if those leave a doubt.

A value is taken apart into values with a single form: numbers, texts, arrays, tensors, and
containers of them. Their bytes are digested, so equal values give equal digests. Anything else is
an *object*, which ``==`` must be able to compare: two equal ones may hold different bytes. Objects
are sent if their digests differ and everything else is equal.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from enum import Enum
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from syncprims._protocol.rounds import RoundSequence
from syncprims._protocol.threads import is_from_signal_handler
from syncprims.errors import RankMismatch
from syncprims.interface import Mark, Note

from . import codec, values
from .arrays import flat, is_list_or_tuple, is_tensor, on_host, raw, spec_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncprims._protocol.rounds import Rounds
    from syncprims.interface import Label

_DIGEST_SIZE = 16
_LENGTH = struct.Struct("<Q")
_DEEPEST = 200  # nested deeper, or in a cycle: the whole is one object
#: What the codec writes in one form only, and shorter than a digest.
_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes})


def assert_same(
    rounds: Rounds, label: Label, value: object, name: str, timeout: float | None
) -> None:
    """Return only if `value` is the same on all members.

    :raises RankMismatch: on all members otherwise.
    """
    try:
        mine = _Digest.of(value, allow_pickle=rounds.settings.pickle)
    except BaseException as error:  # an object's own code runs here: it may raise anything
        values.name_call(rounds, label, error)
        rounds.fail(label, error)
        raise
    RoundSequence.run(
        rounds, Note(label), timeout, lambda sequence: _compare(sequence, value, name, mine)
    )


def _compare(sequence: RoundSequence, value: object, name: str, mine: _Digest) -> None:
    rounds, label = sequence.rounds, sequence.note.label
    posted = mine.fixed + mine.free
    seen = [note.payload for note in sequence.meet(Note(label, payload=posted))]
    if all(other == posted for other in seen):
        return
    text = sequence.attempt(lambda: _shorten(value))
    shown = values.gather_within(sequence, (text, mine.objects))
    equal = all(other[:_DIGEST_SIZE] == mine.fixed for other in seen) and sequence.attempt(
        lambda: _all_equal([found for _, found in shown])
    )
    # Ranks may differ in whether an object equals its copy: one "no" counts for all.
    answer = Note(label, Mark.YES if equal else Mark.NONE)
    if all(note.mark == Mark.YES for note in sequence.meet(answer)):
        return
    lines = "\n".join(
        f"  rank {rank}: {text}  (digest {_hash(other).hex()[:8]})"
        for rank, (text, _), other in zip(rounds.members, shown, seen, strict=True)
    )
    rounds.raise_in_step(
        RankMismatch(
            f"{name} differs between ranks, at {label}:\n{lines}\n"
            f"Make it the same everywhere: equal seeds and inputs, or broadcast it.",
            call=str(label),
            arrived=list(rounds.members),
        )
    )


def _all_equal(found: list[list[Any]]) -> bool:
    first, *others = found
    return all(
        len(other) == len(first) and all(bool(a == b) for a, b in zip(first, other, strict=True))
        for other in others
    )


def _shorten(value: object) -> str:
    """Return the value's repr on one line, without its middle where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception as broken:  # the object's own code: the others wait for what it is
        if is_from_signal_handler(broken):
            raise
        text = f"<no text: its __repr__ raised {type(broken).__name__}>"
    return text if len(text) <= 160 else f"{text[:120]} ... {text[-30:]}"


# -- digests ---------------------------------------------------------------------------------------


class _NoTree(Exception):
    """A container holds itself, or is nested too deeply."""


class _Digest(NamedTuple):
    """What a value is, in few bytes."""

    fixed: bytes  #: the digest of all but the objects, with their types and places
    free: bytes  #: the digest of the objects; these may be equal even if it differs
    objects: list[Any]

    @classmethod
    def of(cls, value: object, *, allow_pickle: bool) -> _Digest:
        """Return the digest of `value`.

        :raises EncodingError: if an object in it could not be sent.
        :raises TypeError: if an object in it could not be compared.
        """
        objects: list[Any] = []
        try:
            fixed = _Walk(objects).digest(value)
        except _NoTree:
            objects, fixed = [value], b""
        encoded = [codec.encode(one, allow_pickle=allow_pickle) for one in objects]
        for one, data in zip(objects, encoded, strict=True):
            _check_comparable(one, codec.decode(data))
        return cls(_hash(fixed), _hash(*encoded), objects)


def _check_comparable(value: Any, copy: Any) -> None:
    """Return only if `value` equals its own copy.

    :raises TypeError: else, so that equal values of two ranks are not reported as different.
    """
    why: Exception | None = None
    try:
        if value == copy:
            return
    except (TypeError, ValueError, RuntimeError) as error:  # as arrays and tensors in it raise
        if is_from_signal_handler(error):
            raise
        why = error
    kind = type(cast("object", value))
    raise TypeError(
        f"assert_same cannot compare a {kind.__module__}.{kind.__qualname__}: it does not equal "
        f"its own copy. Compare plain parts of it: its state_dict(), dataclasses.asdict(), a list"
    ) from why


def _hash(*parts: bytes | memoryview) -> bytes:
    hasher = blake2b(digest_size=_DIGEST_SIZE)
    for part in parts:
        hasher.update(_LENGTH.pack(len(part)))
        hasher.update(part)
    return hasher.digest()


class _Walk:
    """Digests one value, and collects the objects in it."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        self._depth = 0
        self._open: set[int] = set()  # what is being digested
        # Containers seen before, with their digests: one may be in many places. They are kept,
        # so that no other object gets their id.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def digest(self, value: Any) -> bytes:
        """Return the digest of `value`, or the bytes of a simple one."""
        if type(value) in _SIMPLE:
            return codec.encode(value)
        key, before = id(value), len(self._objects)
        if key in self._known:
            return self._known[key][1]
        if key in self._open or len(self._open) >= _DEEPEST:
            raise _NoTree
        self._open.add(key)
        kind = type(cast("object", value))
        parts = self._parts(value)
        if parts is None:
            self._objects.append(value)
            found = b"object"
        else:
            found = _hash(f"{kind.__module__}.{kind.__qualname__}".encode(), *parts)
        self._open.discard(key)
        if len(self._objects) == before:
            self._known[key] = value, found
        return found

    def _parts(self, value: Any) -> Iterable[bytes | memoryview] | None:
        """Return the digests or bytes that make up `value`; None for an object."""
        if is_list_or_tuple(value):
            return map(self.digest, value)
        is_mapping = issubclass(type(cast("object", value)), Mapping)
        if is_mapping or type(value) in (set, frozenset):
            items = value.items() if is_mapping else [(key, b"") for key in value]
            pairs = self._digest_keys(items)
            if pairs is None:
                return None
            return [part for key, item in pairs for part in (key, self.digest(item))]
        if is_tensor(value):
            return _parts_of_tensor(value)
        if isinstance(value, Enum):
            return [codec.encode(value.name)]
        if type(value).__module__.startswith("pathlib"):
            return [codec.encode(str(value))]
        numpy = sys.modules.get("numpy")
        if numpy is not None and (
            type(value) in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)
        ):
            return self._parts_of_array(numpy.asarray(value))
        return None

    def _digest_keys(self, items: Iterable[tuple[Any, Any]]) -> list[tuple[bytes, Any]] | None:
        """Return the items with the digests of their keys, in the order of these.

        None if an object is among the keys: then the container is an object.
        """
        before = len(self._objects)
        pairs = sorted(((self.digest(key), item) for key, item in items), key=itemgetter(0))
        if len(self._objects) == before:
            return pairs
        del self._objects[before:]
        return None

    def _parts_of_array(self, value: Any) -> list[bytes | memoryview]:
        head = f"{value.dtype};{value.shape}".encode()
        if value.dtype.char in "gG":
            raise TypeError(
                f"assert_same cannot compare numbers of {value.dtype}, whose bytes in memory are "
                f"not all set; convert them to float64 or complex128"
            )
        if value.dtype.names is not None:
            return [head, *(self.digest(value[name]) for name in value.dtype.names)]
        if spec_of(value) is None:
            return [head, self.digest(value.tolist())]
        return [head, raw(flat(value))]


def _parts_of_tensor(value: Any) -> list[bytes | memoryview] | None:
    """Return the bytes of a tensor; None for a type that decides itself what its items are.

    :raises TypeError: for tensors that are not plain rows of numbers.
    """
    import torch

    lazy = torch.nn.parameter.is_lazy(value)  # it has no items yet
    dispatch, plain = (getattr(one, "__torch_dispatch__", None) for one in (value, torch.Tensor))
    if lazy or dispatch is not plain:
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        what = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise TypeError(
            f"assert_same cannot compare a tensor that is {what}: compare to_dense(), dequantize() "
            f"or unbind() of it"
        )
    stored = on_host(value.detach())
    facts = [value.dtype, tuple(value.shape), value.requires_grad, value.device.type, value.layout]
    return [f"{facts}".encode(), *([] if stored.is_meta else [raw(flat(stored))])]
