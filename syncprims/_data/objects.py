"""Objects between ranks: encoded once; large arrays in them travel out of band."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims._protocol.rounds import RoundSequence
from syncprims.errors import EncodingError, RankMismatch, SyncError
from syncprims.interface import Note

from . import codec, reduction
from .arrays import Spec, fits, mark_written, may_fill
from .codec import LargeHeader
from .shared_memory import SharedMemoryTransport
from .transport import DeviceTransport, EngineTransport, Operand, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncprims._protocol.rounds import Rounds
    from syncprims.interface import Label


#: What a rank raises if it cannot take what is sent: the others get it in the round. (Torch raises
#: RuntimeError where memory is short.) Anything else comes from outside, and breaks the group.
_CANNOT = (SyncError, OSError, MemoryError, RuntimeError)
#: What Python, numpy and torch raise where numbers cannot be reduced: the same on all ranks.
_NO_RESULT = (TypeError, ValueError, OverflowError, ArithmeticError)


def encode(rounds: Rounds, label: Label, obj: object) -> bytes:
    """Return `obj` as bytes; if it cannot travel, the others get a `PeerFailed` in this round."""
    try:
        return _encode(rounds, label, obj)
    except EncodingError as error:
        rounds.fail(label, error)
        raise


def check(rounds: Rounds, label: Label, obj: object) -> None:
    """Accept an object that could travel, in a world where it need not.

    :raises EncodingError: as where it does.
    """
    _encode(rounds, label, obj, out_of_band=[])


def _encode(rounds: Rounds, label: Label, obj: object, **options: Any) -> bytes:
    """Return `obj` as bytes; an error names the call."""
    try:
        return codec.encode(obj, allow_pickle=rounds.settings.pickle, **options)
    except EncodingError as error:
        name_call(rounds, label, error)
        raise


def name_call(rounds: Rounds, label: Label, error: BaseException) -> None:
    """Add the call to an error that says why an object cannot travel."""
    if isinstance(error, EncodingError):
        error.call, error.rank = str(label), rounds.rank
        error.args = (f"{label}: {error}",)


def _decode(
    rounds: Rounds, payload: bytes, out_of_band: Callable[[Spec], Any] | None = None
) -> Any:
    return codec.decode(
        payload,
        allow_pickle=rounds.settings.pickle,
        out_of_band=out_of_band,
        local_rank=rounds.local_rank,
    )


def _transport(rounds: Rounds) -> Transport | None:
    """Return what carries arrays between all members, if anything does.

    :raises OSError: if there is no space for a window.
    """
    board = rounds.board
    host: Transport | None = None
    if (window := board.window()) is not None:
        host = SharedMemoryTransport(window)
    elif board.engine is not None:
        host = EngineTransport(board.engine)
    return host and DeviceTransport(host, board.device_engine)


class _Package(NamedTuple):
    """An encoded object."""

    payload: bytes
    arrays: list[Any]  #: that travel out of band
    transport: Transport | None  #: None if the payload is all


def _is_large(rounds: Rounds, payload: bytes) -> bool:
    """Return whether `payload` itself travels as an array."""
    limit = rounds.board.note_limit
    return limit is not None and len(payload) > limit


def _pack(rounds: Rounds, label: Label, obj: object) -> _Package:
    arrays: list[Any] = []
    transport = None
    try:
        payload = _encode(rounds, label, obj, out_of_band=arrays)
        if arrays or _is_large(rounds, payload):
            transport = _transport(rounds)
    except _CANNOT as error:
        rounds.fail(label, error)
        raise
    if arrays and transport is None:
        return _Package(encode(rounds, label, obj), [], None)
    return _Package(payload, arrays, transport)


def _broadcast_large(
    sequence: RoundSequence, transport: Transport, src: int, size: int, payload: bytes = b""
) -> bytes:
    """Return the encoded object of `size` that member number `src` sends, as its `payload`."""
    import numpy

    if src == sequence.index:
        transport.broadcast(sequence, [numpy.frombuffer(bytearray(payload), numpy.uint8)], src)
        return payload
    received = numpy.empty(size, numpy.uint8)
    transport.broadcast(sequence, [received], src)
    return received.tobytes()


# -- all-gather --------------------------------------------------------------------------------


def gather(rounds: Rounds, label: Label, obj: Any, timeout: float | None) -> list[Any]:
    """Return every member's object, in rank order; one's own is the very object."""
    payload = encode(rounds, label, obj)
    if rounds.board.note_limit is None:
        payloads = [note.payload for note in rounds.meet(Note(label, payload=payload), timeout)]
    else:
        payloads = RoundSequence.run(rounds, Note(label), timeout, lambda s: _gather(s, payload))
    return [
        obj if rank == rounds.rank else _decode(rounds, payload)
        for rank, payload in zip(rounds.members, payloads, strict=True)
    ]


def gather_within(sequence: RoundSequence, obj: Any) -> list[Any]:
    """Return every member's object, in rank order, as one step of a longer call."""
    rounds = sequence.rounds
    try:
        payload = _encode(rounds, sequence.note.label, obj)
    except _CANNOT as error:
        sequence.fail(error)
        raise
    return [_decode(rounds, other) for other in _gather(sequence, payload)]


def _gather(sequence: RoundSequence, payload: bytes) -> list[bytes]:
    """Return all members' payloads; large ones follow as arrays, one member's after the other's."""
    transport = _transport(sequence.rounds)
    large = transport is not None and _is_large(sequence.rounds, payload)
    posted = LargeHeader(len(payload), has_arrays=False).encode() if large else payload
    notes = sequence.meet(Note(sequence.note.label, large, posted))
    found: list[bytes] = []
    for member, note in enumerate(notes):
        found.append(note.payload)
        header = LargeHeader.decode(note.payload)
        if header is not None:
            assert transport is not None, "all members have one, or none has"
            found[-1] = _broadcast_large(sequence, transport, member, header.size, payload)
    return found


# -- broadcast ---------------------------------------------------------------------------------


def broadcast(
    rounds: Rounds, note: Note, obj: Any, src: int, out: Any, timeout: float | None
) -> Any:
    """Return `src`'s object on every member, an array in `out` where that fits."""
    if src == rounds.rank:
        package = _pack(rounds, note.label, obj)
        RoundSequence.run(rounds, note, timeout, lambda sequence: _send(sequence, package))
        return obj
    return RoundSequence.run(rounds, note, timeout, lambda sequence: _receive(sequence, src, out))


def _send(sequence: RoundSequence, package: _Package) -> None:
    payload, arrays, transport = package
    label = sequence.note.label
    if transport is None:
        sequence.meet(Note(label, payload=payload))
        return
    large = _is_large(sequence.rounds, payload)
    posted = LargeHeader(len(payload), bool(arrays)).encode() if large else payload
    sequence.meet(Note(label, True, posted))
    if large:
        _broadcast_large(sequence, transport, sequence.index, len(payload), payload)
    if arrays:
        transport.broadcast(sequence, arrays, sequence.index)


def _receive(sequence: RoundSequence, src: int, out: Any) -> Any:
    rounds = sequence.rounds
    index = rounds.members.index(src)
    sent = sequence.meet()[index]
    payload = sent.payload
    if not sent.flag:
        return _decode(rounds, payload)
    arrays: list[Any] = []
    may_use_out = codec.is_one_array(payload)  # the object is an array, and no more

    def make(spec: Spec) -> Any:
        arrays.append(out if may_use_out and fits(out, spec) else spec.make(rounds.local_rank))
        return arrays[-1]

    header = LargeHeader.decode(payload)
    try:
        transport = _transport(rounds)
        assert transport is not None, "the source has one"
        if header is not None:
            payload = _broadcast_large(sequence, transport, index, header.size)
        value = _decode(rounds, payload, make)
    except _CANNOT as error:
        if header is None or header.has_arrays:
            sequence.fail(error)
        raise
    if arrays:
        transport.broadcast(sequence, arrays, index)
    if value is out:
        mark_written(out)
    return value


# -- all-reduce --------------------------------------------------------------------------------


def all_reduce(
    rounds: Rounds, note: Note, value: Any, op: str, out: Any, timeout: float | None
) -> Any:
    """Return the reduction over all members, an array in `out` where that fits."""
    try:
        reduction.check_value(value, op)
    except TypeError as error:
        rounds.fail(note.label, error)
        raise
    value = reduction.detached(value)
    package = _pack(rounds, note.label, value)
    return RoundSequence.run(
        rounds, note, timeout, lambda sequence: _all_reduce(sequence, package, value, op, out)
    )


def _all_reduce(sequence: RoundSequence, package: _Package, value: Any, op: str, out: Any) -> Any:
    payload, arrays, transport = package
    notes = sequence.meet(Note(sequence.note.label, bool(arrays), payload))
    payloads = [note.payload for note in notes]
    operands: list[Operand] = []

    def add_operand(mine: Any) -> Any:
        """Return the array that the reduction of `mine` will be in."""
        direct = codec.is_one_array(payload)  # the value is an array, and no more
        if direct and reduction.fits_result(out, mine, op) and may_fill(out, mine):
            operands.append(Operand(mine, out))
        else:
            operands.append(Operand(mine, reduction.empty_result(mine, op)))
        return operands[-1].result

    try:
        if arrays and arrays[0] is value and len(set(payloads)) == 1:
            result = add_operand(value)  # one array, alike on all: there is nothing to compare
        else:
            # Equal bytes are decoded once.
            known: dict[bytes, Any] = {} if arrays else {payload: value}
            for other in payloads:
                if other not in known:
                    known[other] = _decode(sequence.rounds, other, reduction.number_arrays())
            result = _reduce(
                sequence,
                [known[other] for other in payloads],
                op,
                lambda placeholders: add_operand(arrays[placeholders[sequence.index].number]),
            )
    except RankMismatch:
        raise  # on all
    except (*_CANNOT, *_NO_RESULT) as error:
        if arrays:
            sequence.fail(error)
        sequence.rounds.reported = error  # or it need not be: the round is complete
        raise
    if transport is not None and operands:
        transport.reduce(sequence, operands, op)
        if result is out:
            mark_written(out)
    return result


def _reduce(
    sequence: RoundSequence,
    values: list[Any],
    op: str,
    out_of_band: Callable[[list[reduction.Placeholder]], Any],
) -> Any:
    """Return the reduction of `values`; an error names the call."""
    rounds, here = sequence.rounds, str(sequence.note.label)
    try:
        return reduction.reduce(values, op, rounds.members, out_of_band)
    except RankMismatch as error:
        raise RankMismatch(
            f"{here}: {error}", rank=rounds.rank, call=here, arrived=list(rounds.members)
        ) from None
    except _NO_RESULT as error:
        # The builtin one: numpy's own cannot be made from a text.
        kind = next(one for one in _NO_RESULT if one in type(error).__mro__)
        raise kind(f"{here}: these values have no {op}: {error}") from error
