"""Compare a value between ranks, by digests.

A value is taken apart into values with a single form: numbers, texts, arrays, tensors, and
containers of them. Their bytes are digested, so equal values give equal digests. An object without
such a form is refused: two equal ones may hold different bytes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NoReturn, cast

from syncprims._protocol.rounds import Rounds, RoundSequence
from syncprims._protocol.threads import is_from_signal_handler
from syncprims.errors import RankMismatch
from syncprims.interface import Label, Note

from . import Value, codec, values
from .arrays import flat, is_list_or_tuple, is_tensor, on_host, raw, spec_of

_DIGEST_SIZE = 16
_DEEPEST = 200
#: Types whose `repr` says all that a value is.
_SHOWN = frozenset((
    "builtins.range", "builtins.slice", "builtins.bytearray", "fractions.Fraction",
    "decimal.Decimal", "datetime.date", "datetime.datetime", "datetime.timedelta", "torch.dtype",
    "torch.device",
))  # fmt: skip


def assert_same(
    rounds: Rounds, label: Label, value: object, name: str, timeout: float | None
) -> None:
    """Return only if `value` is the same on all members.

    :raises RankMismatch: on all members otherwise.
    :raises TypeError: if a part of it has no single form; the others raise `PeerFailed`.
    """
    try:
        mine = _hash(_Walk().digest(value))
    except BaseException as error:  # an object's own code runs here: it may raise anything
        rounds.fail(label, error)
        raise
    RoundSequence.run(
        rounds, Note(label), timeout, lambda sequence: _compare(sequence, value, name, mine)
    )


def _compare(sequence: RoundSequence, value: object, name: str, mine: bytes) -> None:
    rounds, label = sequence.rounds, sequence.note.label
    seen = [note.payload for note in sequence.meet(Note(label, payload=mine))]
    if all(other == mine for other in seen):
        return
    text = sequence.attempt(lambda: _shorten(value))
    lines = "\n".join(
        f"  rank {rank}: {shown}  (digest {digest.hex()[:8]})"
        for rank, shown, digest in zip(
            rounds.members, values.gather_within(sequence, text), seen, strict=True
        )
    )
    rounds.raise_shared_error(
        RankMismatch(
            f"{name} differs between ranks, at {label}:\n{lines}\n"
            f"Make it the same everywhere: equal seeds and inputs, or broadcast it.",
            call=str(label),
            arrived=list(rounds.members),
        )
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


def _hash(*parts: bytes | memoryview) -> bytes:
    digests = [blake2b(part, digest_size=_DIGEST_SIZE).digest() for part in parts]
    return blake2b(b"".join(digests), digest_size=_DIGEST_SIZE).digest()


class _Walk:
    """Digests one value."""

    def __init__(self) -> None:
        self._open: set[int] = set()  # the identities of containers whose digest is computed now
        # Containers seen before, with their digests: one may be in many places. They are kept,
        # so that no other object gets their id.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def digest(self, value: Value) -> bytes:
        """Return the digest of `value`, or the bytes of a simple one."""
        if type(value) in codec.LEAVES:
            return codec.encode(value)
        key = id(value)
        if key in self._known:
            return self._known[key][1]
        if key in self._open or len(self._open) >= _DEEPEST:
            _refuse(value, "it holds itself, or is nested too deeply")
        self._open.add(key)
        kind = type(cast("object", value))
        digest = _hash(f"{kind.__module__}.{kind.__qualname__}".encode(), *self._parts(value))
        self._open.discard(key)
        self._known[key] = value, digest
        return digest

    def _parts(self, value: Value) -> Iterable[bytes | memoryview]:
        """Return the digests or bytes that make up `value`.

        :raises TypeError: if it has no single form.
        """
        kind = type(cast("object", value))
        if is_list_or_tuple(value):
            return map(self.digest, value)
        if issubclass(kind, Mapping) or kind in (set, frozenset):
            items = value.items() if issubclass(kind, Mapping) else [(key, b"") for key in value]
            pairs = sorted(((self.digest(key), item) for key, item in items), key=itemgetter(0))
            return [part for key, item in pairs for part in (key, self.digest(item))]
        if is_tensor(value):
            return _parts_of_tensor(value)
        if isinstance(value, Enum):
            return [codec.encode(value.name)]
        if kind.__module__.startswith("pathlib"):
            return [codec.encode(str(value))]
        if f"{kind.__module__}.{kind.__qualname__}" in _SHOWN:
            return [codec.encode(repr(value))]
        if dataclasses.is_dataclass(kind) or kind.__name__ in ("Namespace", "SimpleNamespace"):
            return [self.digest(vars(value))]
        numpy = sys.modules.get("numpy")
        if numpy is None or not (
            kind in (numpy.ndarray, numpy.memmap) or isinstance(value, numpy.generic)
        ):
            _refuse(value, "it has no single form")
        return self._parts_of_array(numpy.asarray(value))

    def _parts_of_array(self, value: Value) -> list[bytes | memoryview]:
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


def _refuse(value: object, why: str) -> NoReturn:
    kind = type(value)
    raise TypeError(
        f"assert_same cannot compare a {kind.__module__}.{kind.__qualname__}: {why}. Compare plain "
        f"parts of it: its state_dict(), vars(), a list"
    )


def _parts_of_tensor(value: Value) -> list[bytes | memoryview]:
    """Return the bytes of a tensor.

    :raises TypeError: for tensors that are not plain rows of numbers.
    """
    import torch

    lazy = torch.nn.parameter.is_lazy(value)  # it has no items yet
    dispatch, plain = (getattr(one, "__torch_dispatch__", None) for one in (value, torch.Tensor))
    if lazy or dispatch is not plain:
        _refuse(value, "its items are not plain memory")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        what = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        raise TypeError(
            f"assert_same cannot compare a tensor that is {what}: compare to_dense(), dequantize() "
            f"or unbind() of it"
        )
    stored = on_host(value.detach())
    facts = [value.dtype, tuple(value.shape), value.requires_grad, value.device.type, value.layout]
    return [f"{facts}".encode(), *([] if stored.is_meta else [raw(flat(stored))])]
