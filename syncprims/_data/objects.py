"""Objects between ranks: encoded once; large arrays in them travel out of band."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims._protocol.rounds import RoundSequence
from syncprims.errors import EncodingError, RankMismatch
from syncprims.interface import Mark, Note

from . import codec, reduction
from .arrays import Spec, fits, library_of, mark_written, may_fill
from .codec import LargeHeader, holds_pickle
from .layouts import ArrayLayout
from .plane import DataPlane
from .prepared_calls import FirstRound, PreparedBroadcast, PreparedGather, PreparedReduction
from .results import copy_into
from .transport import Operand, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims._protocol.rounds import Rounds
    from syncprims.interface import Label


#: What Python, numpy and torch raise where numbers cannot be reduced: the same on all ranks.
_NO_RESULT = (TypeError, ValueError, LookupError, OverflowError, ArithmeticError)


def encode(rounds: Rounds, label: Label, obj: object) -> bytes:
    """Return `obj` as bytes; whatever prevents it, the others get a `PeerFailed` in this round."""
    try:
        return _encode(rounds, label, obj)
    except BaseException as error:
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


def name_call(rounds: Rounds, label: Label, error: BaseException, about: str = "") -> None:
    """Add the call, and what it is about, to an error that says why an object cannot travel."""
    if isinstance(error, EncodingError):
        error.call, error.rank = str(label), rounds.rank
        error.args = (f"{label}: {about}{error}",)


def _decode(
    rounds: Rounds,
    label: Label,
    src: int,
    payload: bytes,
    out_of_band: Callable[[Spec], Any] | None = None,
) -> Any:
    """Return the object that rank `src` has sent; an error names the call and that rank."""
    try:
        return codec.decode(
            payload,
            allow_pickle=rounds.settings.pickle,
            out_of_band=out_of_band,
            local_rank=rounds.local_rank,
        )
    except EncodingError as error:
        name_call(rounds, label, error, f"what rank {src} has sent: ")
        raise


def _needed_transport(rounds: Rounds) -> Transport:
    """Return what carries arrays, where another member has one.

    :raises OSError: if there is no room for a window.
    """
    transport = DataPlane.of(rounds).transport()
    assert transport is not None, "all members have one, or none has"
    return transport


class _Package(NamedTuple):
    """An encoded object."""

    payload: bytes
    arrays: list[Any]  #: that travel out of band
    transport: Transport | None  #: None if the payload is all


def _is_large(rounds: Rounds, payload: bytes) -> bool:
    """Return whether `payload` itself travels as an array."""
    board = rounds.board
    limit = board.note_limit
    return limit is not None and len(payload) > limit and board.engine is not None


def _pack(rounds: Rounds, label: Label, obj: object) -> _Package:
    arrays: list[Any] = []
    transport = None
    payload = _encode(rounds, label, obj, out_of_band=arrays)
    if arrays or _is_large(rounds, payload):
        transport = DataPlane.of(rounds).transport()
    if arrays and transport is None:
        return _Package(_encode(rounds, label, obj), [], None)
    return _Package(payload, arrays, transport)


def _broadcast_large(
    sequence: RoundSequence, transport: Transport, src: int, size: int, payload: bytes = b""
) -> bytes:
    """Return the encoded object of `size` that member number `src` sends, as its `payload`."""

    def make() -> Any:
        import numpy

        if src == sequence.index:
            return numpy.frombuffer(bytearray(payload), numpy.uint8)
        return numpy.empty(size, numpy.uint8)

    array = sequence.attempt(make)
    transport.broadcast(sequence, [array], src)
    return payload or array.tobytes()


# -- all-gather --------------------------------------------------------------------------------


def gather(rounds: Rounds, note: Note, obj: Any, timeout: float | None) -> list[Any]:
    """Return every member's object, in rank order; one's own is the very object."""
    if rounds.board.note_limit is not None:
        payload = encode(rounds, note.label, obj)
        return RoundSequence.run(rounds, note, timeout, lambda s: _gather(s, obj, payload))
    try:
        first = _prepared_gather(rounds, note, obj, timeout)
    except BaseException as error:
        rounds.fail(note.label, error)
        raise
    if first is None:
        payload = encode(rounds, note.label, obj)
        read = partial(_gather_any, rounds, note, timeout, obj)
        first = note._replace(payload=payload), timeout, read, None
    return rounds.meet(*first)


def _prepared_gather(
    rounds: Rounds, note: Note, obj: Any, timeout: float | None
) -> FirstRound | None:
    """Return the round that gathers values of a layout; None for others."""
    plane: DataPlane = rounds.data or DataPlane.of(rounds)
    found = plane.find(note, obj)
    if found is None:
        return None
    call: PreparedGather | None
    layout, packed, call = found
    if call is None:
        if plane.place(layout) is None:
            return None
        otherwise = partial(_gather_any, rounds, note)
        call = plane.keep((id(note), id(layout)), PreparedGather(plane, layout, note, otherwise))
    return call.start(packed, obj, timeout)


def _gather_any(
    rounds: Rounds, note: Note, timeout: float | None, obj: Any, notes: Sequence[Note]
) -> list[Any]:
    """Return all members' objects of all kinds."""
    plane, sequence = DataPlane.of(rounds), RoundSequence(rounds, note, timeout)
    layouts = plane.layouts_of(notes)
    if all(layout is None or layout.stride <= plane.small_slot for layout in layouts):
        payloads = plane.small_encodings(rounds.board.collected, notes)
        return _decode_all(rounds, sequence, obj, payloads)
    # Larger slots are not written, or overlap where they differ in size.
    arrays = [layout for layout in layouts if isinstance(layout, ArrayLayout)]
    if len(arrays) < len(layouts):
        return gather_within(sequence, obj)
    return _gather_arrays(sequence, obj, [layout.spec for layout in arrays])


def _gather_arrays(sequence: RoundSequence, mine: Any, specs: Sequence[Spec]) -> list[Any]:
    """Return all members' arrays, which may differ in size, in memory that they share."""

    def make() -> list[Any]:
        return [None if i == sequence.index else spec.make() for i, spec in enumerate(specs)]

    rooms = sequence.attempt(make)
    _needed_transport(sequence.rounds).gather(sequence, mine, rooms)
    return [mine if room is None else room for room in rooms]


def gather_within(sequence: RoundSequence, obj: Any) -> list[Any]:
    """Return every member's object as :func:`gather`, as a part of another call."""
    label = sequence.note.label
    return _gather(sequence, obj, sequence.attempt(lambda: _encode(sequence.rounds, label, obj)))


def _gather(sequence: RoundSequence, obj: Any, payload: bytes) -> list[Any]:
    """Return all members' objects; large ones follow as arrays, one member's after the other's."""
    rounds, label = sequence.rounds, sequence.note.label
    large = _is_large(rounds, payload)
    posted = LargeHeader(len(payload), has_arrays=False).encode() if large else payload
    payloads = [note.payload for note in sequence.meet(Note(label, payload=posted))]
    for member, found in enumerate(payloads):
        header = LargeHeader.decode(found)
        if header is not None:
            transport = sequence.attempt(lambda: _needed_transport(rounds))
            mine = payload if member == sequence.index else b""
            payloads[member] = _broadcast_large(sequence, transport, member, header.size, mine)
    return _decode_all(rounds, sequence, obj, payloads)


def _decode_all(
    rounds: Rounds, sequence: RoundSequence, obj: Any, payloads: Sequence[bytes]
) -> list[Any]:
    """Return all members' objects, or raise on all members, if one of them cannot make one."""

    def decode() -> list[Any]:
        return [
            obj if rank == rounds.rank else _decode(rounds, sequence.note.label, rank, payload)
            for rank, payload in zip(rounds.members, payloads, strict=True)
        ]

    if any(map(holds_pickle, payloads)):
        return sequence.agree(decode)
    return decode()


# -- broadcast ---------------------------------------------------------------------------------


def broadcast(
    rounds: Rounds, note: Note, obj: Any, src: int, out: Any, timeout: float | None
) -> Any:
    """Return `src`'s object on every member, an array in `out` where that fits."""
    if src != rounds.rank:
        return _receive(rounds, note, src, out, timeout)
    try:
        first = _prepared_send(rounds, note, obj, out, timeout)
        if first is None:
            first = _packed_send(rounds, note, obj, out, timeout)
    except BaseException as error:
        rounds.fail(note.label, error)
        raise
    return rounds.meet(*first)


def _prepared_send(
    rounds: Rounds, note: Note, obj: Any, out: Any, timeout: float | None
) -> FirstRound | None:
    """Return the round of an object that takes only one, or None for others."""
    plane: DataPlane = rounds.data or DataPlane.of(rounds)
    found = plane.find(note, obj)
    if found is None:
        return None
    call: PreparedBroadcast | None
    layout, packed, call = found
    if call is None:
        if not plane.reaches_all(layout):
            return None
        call = plane.keep((id(note), id(layout)), PreparedBroadcast(plane, layout, note))
    return call.send(packed, timeout, partial(_sent, rounds, out, obj))


def _sent(rounds: Rounds, out: Any, obj: Any, _: Sequence[Note]) -> Any:
    return copy_into(rounds, out, obj)


def _packed_send(
    rounds: Rounds, note: Note, obj: Any, out: Any, timeout: float | None
) -> FirstRound:
    """Return the first round of any object."""
    package = _pack(rounds, note.label, obj)
    payload, _, transport = package
    large = _is_large(rounds, payload)
    posted = LargeHeader(len(payload), bool(package.arrays)).encode() if large else payload

    def send(_: Sequence[Note]) -> Any:
        _send(RoundSequence(rounds, note, timeout), package)
        return copy_into(rounds, out, obj)

    mark = Mark.NONE if transport is None else Mark.MORE
    return Note(note.label, mark, posted), timeout, send, None


def _receive(rounds: Rounds, note: Note, src: int, out: Any, timeout: float | None) -> Any:
    """Return what `src` sends; most likely it is like the last object that came to this site."""
    plane: DataPlane = rounds.data or DataPlane.of(rounds)
    expected: PreparedBroadcast | None = plane.calls.get(id(note))

    def read(notes: Sequence[Note]) -> Any:
        sent = notes[rounds.members.index(src)]
        if not sent.label.data:
            return _receive_package(RoundSequence(rounds, note, timeout), sent, src, out)
        call = expected
        if call is None or not call.brings(sent):
            call = PreparedBroadcast(plane, plane.described(sent.label.data), note)
            if call.window is not None:
                plane.keep(id(note), call)
        return call.read(sent, out)

    return rounds.meet(note if expected is None else expected.header, timeout, read)


def _send(sequence: RoundSequence, package: _Package) -> None:
    """Send what follows the first note."""
    payload, arrays, transport = package
    if transport is not None and _is_large(sequence.rounds, payload):
        _broadcast_large(sequence, transport, sequence.index, len(payload), payload)
    if transport is not None and arrays:
        transport.broadcast(sequence, arrays, sequence.index)
        DataPlane.of(sequence.rounds).window_is_shared = True
    elif holds_pickle(payload):
        sequence.meet()  # have all been able to make the object?


def _receive_package(sequence: RoundSequence, sent: Note, src: int, out: Any) -> Any:
    rounds, label = sequence.rounds, sequence.note.label
    index = rounds.members.index(src)
    payload, arrays_follow = sent.payload, sent.mark == Mark.MORE
    transport: Transport | None = None
    if arrays_follow:
        transport = sequence.attempt(lambda: _needed_transport(rounds))
        header = LargeHeader.decode(payload)
        if header is not None:
            payload = _broadcast_large(sequence, transport, index, header.size)
            arrays_follow = header.has_arrays
    arrays: list[Any] = []
    may_use_out = codec.is_one_array(payload)  # the object is an array, and no more

    def make(spec: Spec) -> Any:
        arrays.append(out if may_use_out and fits(out, spec) else spec.make(rounds.local_rank))
        return arrays[-1]

    def decode() -> Any:
        return _decode(rounds, label, src, payload, make)

    if transport is not None and arrays_follow:
        value = sequence.attempt(decode)
        transport.broadcast(sequence, arrays, index)
        DataPlane.of(rounds).window_is_shared = True
    elif holds_pickle(payload):
        value = sequence.agree(decode)
    else:
        value = decode()
    if value is out and arrays:
        mark_written(out)
    return copy_into(rounds, out, value)


# -- all-reduce --------------------------------------------------------------------------------


def all_reduce(
    rounds: Rounds, note: Note, value: Any, op: str, out: Any, timeout: float | None
) -> Any:
    """Return the reduction over all members, an array in `out` where that fits."""
    try:
        grad = getattr(value, "requires_grad", None)  # None: `value` is no tensor
        if grad is not None and (grad or library_of(value) is None):
            value = value.detach()  # so a parameter is a plain tensor, frozen or not
        first = _prepared_reduction(rounds, note, value, op, out, timeout)
        if first is None:
            first = _packed_reduction(rounds, note, value, op, out, timeout)
    except BaseException as error:
        rounds.fail(note.label, error)
        raise
    return rounds.meet(*first)


def _prepared_reduction(
    rounds: Rounds, note: Note, value: Any, op: str, out: Any, timeout: float | None
) -> FirstRound | None:
    """Return the round that reduces a value of numbers alone, or None if `value` is another.

    Each rank has a slot for its numbers: in the window, or in its note where there is no window.
    """
    plane: DataPlane = rounds.data or DataPlane.of(rounds)
    found = plane.find(note, value)
    if found is None:
        return None
    call: PreparedReduction | None
    layout, packed, call = found
    if call is None:
        reduction.check_value(value, op)

        def in_pieces(timeout: float | None, value: Any, place: Any) -> None:
            operands = [Operand(value, place)]
            _needed_transport(rounds).reduce(RoundSequence(rounds, note, timeout), operands, op)

        def otherwise(timeout: float | None, notes: Sequence[Note], value: Any, out: Any) -> Any:
            sequence = RoundSequence(rounds, note, timeout)
            return _reduce_any(sequence, notes, None, value, op, out)

        made = PreparedReduction(plane, layout, note, op, in_pieces, otherwise)
        call = plane.keep((id(note), id(layout)), made)
    return call.start(packed, value, out, timeout)


def _packed_reduction(
    rounds: Rounds, note: Note, value: Any, op: str, out: Any, timeout: float | None
) -> FirstRound:
    """Return the first round of the reduction of any value."""
    reduction.check_value(value, op)
    value = reduction.detached(value)
    package = _pack(rounds, note.label, value)
    # A round follows, in which all learn if one member cannot go on.
    mark = Mark.MORE if package.arrays or holds_pickle(package.payload) else Mark.NONE

    def read(notes: Sequence[Note]) -> Any:
        return _reduce_any(RoundSequence(rounds, note, timeout), notes, package, value, op, out)

    return Note(note.label, mark, package.payload), timeout, read, None


def _reduce_any(
    sequence: RoundSequence,
    notes: Sequence[Note],
    package: _Package | None,
    value: Any,
    op: str,
    out: Any,
) -> Any:
    """Return the reduction of values that may differ in kind, or raise how they differ."""
    rounds, label = sequence.rounds, sequence.note.label
    more = any(note.mark == Mark.MORE for note in notes)
    if package is None:

        def pack() -> _Package:
            return _pack(rounds, label, value)

        package = sequence.attempt(pack) if more else pack()
    payload, arrays, transport = package
    payloads = DataPlane.of(rounds).encodings(rounds.board.collected, notes)
    operands: list[Operand] = []

    def add_operand(mine: Any) -> Any:
        """Return the array that the reduction of `mine` will be in."""
        direct = codec.is_one_array(payload)  # the value is an array, and no more
        if direct and reduction.fits_result(out, mine, op) and may_fill(out, mine):
            operands.append(Operand(mine, out))
        else:
            operands.append(Operand(mine, reduction.empty_result(mine, op)))
        return operands[-1].result

    def combine() -> Any:
        # Equal bytes are decoded once, also this rank's own: the value may have changed meanwhile.
        known: dict[bytes, Any] = {}
        for rank, other in zip(rounds.members, payloads, strict=True):
            if other not in known:
                known[other] = _decode(rounds, label, rank, other, reduction.number_arrays())
        return _reduce(
            sequence,
            [known[other] for other in payloads],
            op,
            lambda placeholders: add_operand(arrays[placeholders[sequence.index].number]),
        )

    if not more:
        result = combine()
    elif not arrays:
        result = sequence.agree(combine)
    else:
        result = sequence.attempt(combine)
        assert transport is not None, "it has taken the arrays"
        transport.reduce(sequence, operands, op)
        if result is out:
            mark_written(out)
    return copy_into(rounds, out, result)


def _reduce(
    sequence: RoundSequence,
    values: list[Any],
    op: str,
    out_of_band: Callable[[list[reduction.Placeholder]], Any],
) -> Any:
    """Return the reduction of `values`; an error is the same on all ranks, and names the call."""
    rounds, here = sequence.rounds, str(sequence.note.label)
    try:
        return reduction.reduce(values, op, rounds.members, out_of_band)
    except (RankMismatch, *_NO_RESULT) as error:
        if not _is_of_reduction(error):
            raise  # on this rank alone
        own: Exception
        if isinstance(error, RankMismatch):
            arrived = list(rounds.members)
            own = RankMismatch(f"{here}: {error}", rank=rounds.rank, call=here, arrived=arrived)
            cause = None
        else:
            # The builtin one: numpy's own cannot be made from a text.
            kind = next(one for one in _NO_RESULT if one in type(error).__mro__)
            own, cause = kind(f"{here}: these values have no {op}: {error}"), error
        rounds.in_step = own
        raise own from cause


def _is_of_reduction(error: BaseException) -> bool:
    """Return whether the reduction itself has raised `error`, and not a signal handler in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__")) if trace is not None else ""
    return module.partition(".")[0] in ("syncprims", "numpy", "torch")
