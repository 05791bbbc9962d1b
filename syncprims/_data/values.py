"""Values between ranks: gather, broadcast and all-reduce, for all values and all backends.

A value takes one of three ways, as :mod:`syncprims._data.plane` decides. One with slots takes one
round. A single large array is described in the label of a first round, and then goes through the
transport. Any other value is encoded into the notes of a round, and large arrays in it follow
through the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from syncprims._protocol.call_site import notes_of
from syncprims._protocol.rounds import Rounds, RoundSequence
from syncprims.errors import EncodingError, RankMismatch
from syncprims.interface import Label, Mark, Note

from . import LARGEST_NOTE, Out, Value, codec, reduction
from .arrays import Spec, is_array, is_tensor, library_of, mark_written, may_fill
from .codec import decode_size, encode_size, holds_pickle
from .layouts import ArrayLayout, Layout
from .plane import DataPlane
from .transport import Operand

#: What a call makes its first round of: its note, ``read(notes)``, and what writes its slot.
_First = tuple[Note, Callable[[Sequence[Note]], Any], Callable[[], object] | None]

#: What Python, numpy and torch raise where numbers cannot be reduced: the same on all ranks.
_NO_RESULT = (TypeError, ValueError, LookupError, OverflowError, ArithmeticError)


# -- a call with a layout, prepared once for each call site ----------------------------------------


class _PreparedCall:
    """A prepared call: the facts that all calls of one site with values of one layout share."""

    only_source_writes = False

    def __init__(self, plane: DataPlane, layout: Layout, note: Note, value: Value = None) -> None:
        """Prepare the calls whose plain note is `note`, with values like `value`.

        :raises OSError: if there is no space for the slots.
        """
        self.note = note
        self.layout = layout
        # Not the plane, which has the call: its memory is free at once when the group is closed.
        self._rounds, self._board = plane.rounds, plane.board
        self._window = plane.window_of(layout)
        if self._window is not None:
            self._memory, self._fence = self._window
            self._half = plane.half(self._window)
        self._index, self._end = plane.rounds.index, plane.count * layout.stride
        self._own_at = 0 if self.only_source_writes else self._index * layout.stride
        self._in_slots = plane.takes_one_round(layout)
        plain = note.label
        label = plain.kind, plain.name, plain.src, plain.op, plain.site, layout.data
        self.header = notes_of(*label)[0]  #: the note, with the description of the value

    def write(self, packed: Value) -> None:
        """Write this rank's slot for the round that it posts next."""
        at = self._half * (self._board.posted + 1 & 1)
        self.layout.write(self._memory, at + self._own_at, packed)
        self._fence()

    def _begin_reading(self) -> int:
        """Return where the slots of the round begin that was collected last."""
        self._fence()
        return self._half * (self._board.collected & 1)

    def _is_in_all(self, notes: Sequence[Note]) -> bool:
        """Return whether the values of all members have this layout."""
        header, data = self.header, self.layout.data
        for other in notes:  # noqa: SIM110 - faster than `all`
            if other is not header and other.label.data != data:
                return False
        return True

    def first_round(self, packed: Value, value: Value, out: Out, timeout: float | None) -> _First:
        """Return the first round of a call with `value`, which is `packed`."""
        write = partial(self.write, packed) if self._in_slots else None
        return self.header, partial(self._read, timeout, value, out), write

    def _read(self, timeout: float | None, value: Value, out: Out, notes: Sequence[Note]) -> Any:
        """Return the result of the call."""
        raise NotImplementedError


def _call(
    cls: Any, rounds: Rounds, note: Note, value: Value, out: Out, timeout: float | None, *more: Any
) -> Any:
    """Return the result of a call of this class; if it cannot begin, the others get a `PeerFailed`.

    A value that has a layout takes a prepared call. ``cls.first_of_any`` returns the first round
    of any other value.
    """
    try:
        plane = DataPlane.of(rounds)
        found = None if plane.count == 1 else plane.find(note, value)  # of one, nothing travels
        if found is not None:
            layout, packed, call = found
            if call is None:
                call = plane.keep((id(note), id(layout)), cls(plane, layout, note, value, *more))
            first_note, read, write = call.first_round(packed, value, out, timeout)
        else:
            sequence = RoundSequence(rounds, note, timeout)
            first_note, read, write = cls.first_of_any(sequence, value, out, *more)
    except BaseException as error:
        rounds.fail(note.label, error)
        raise
    return rounds.meet(first_note, timeout, read, write)


# -- any object, encoded ---------------------------------------------------------------------------


def _check_encodable(rounds: Rounds, label: Label, obj: Value) -> None:
    """Accept an object that could travel, in a world where it need not.

    :raises EncodingError: as where it does.
    """
    if type(obj) in codec.LEAVES or (is_array(obj) and obj.dtype.kind in "biufc"):
        return
    is_dict: bool = type(obj) is dict
    parts: Any = (*obj, *obj.values()) if is_dict else (obj,)
    if not codec.LEAVES.keys() >= {*map(type, parts)}:  # else it could: the fastest way to know
        _encode(rounds, label, obj, out_of_band=[])


def _encode(rounds: Rounds, label: Label, obj: object, **options: Any) -> bytes:
    """Return `obj` as bytes; an error names the call."""
    try:
        return codec.encode(obj, allow_pickle=rounds.settings.pickle, **options)
    except EncodingError as error:
        _name_call(rounds, label, error)
        raise


def _name_call(rounds: Rounds, label: Label, error: EncodingError, about: str = "") -> None:
    """Add the call, and what it is about, to an error that says why an object cannot travel."""
    error.call, error.rank = str(label), rounds.rank
    error.args = (f"{label}: {about}{error}",)


def _decode(sequence: RoundSequence, src: int, payload: bytes, out_of_band: Out = None) -> Any:
    """Return the object that rank `src` has sent; an error names the call and that rank."""
    rounds = sequence.rounds
    try:
        return codec.decode(
            payload,
            allow_pickle=rounds.settings.pickle,
            out_of_band=out_of_band,
            local_rank=rounds.local_rank,
        )
    except EncodingError as error:
        _name_call(rounds, sequence.note.label, error, f"what rank {src} has sent: ")
        raise


def _pack(rounds: Rounds, label: Label, obj: object) -> tuple[bytes, list[Any]]:
    """Return `obj` as bytes, and the arrays in it that follow through the transport."""
    arrays: list[Any] = []
    payload = _encode(rounds, label, obj, out_of_band=arrays)
    if arrays and DataPlane.of(rounds).transport() is None:
        return _encode(rounds, label, obj), []
    return payload, arrays


def _shorten(rounds: Rounds, payload: bytes) -> bytes:
    """Return what a note holds of an encoded object: all, or its size if it follows as an array."""
    limit = rounds.board.note_limit or LARGEST_NOTE
    is_large = len(payload) > limit and DataPlane.of(rounds).transport() is not None
    return encode_size(len(payload)) if is_large else payload


def _broadcast_rest(
    sequence: RoundSequence, src: int, posted: bytes, payload: bytes | None = None
) -> bytes:
    """Return the encoded object of member number `src`, whose note holds `posted`.

    On that member, it is `payload`.
    """
    size = decode_size(posted)
    if size is None:
        return posted

    transport = sequence.attempt(DataPlane.of(sequence.rounds).needed_transport)
    room = sequence.attempt(lambda: memoryview(payload or bytearray(size)))
    transport.broadcast(sequence, [room], src)
    return bytes(room) if payload is None else payload


def _values_of(
    rounds: Rounds, notes: Sequence[Note], decode: Callable[[int, bytes], Any]
) -> list[Any]:
    """Return the values that came with the notes of the last round.

    Those that are encoded, ``decode(rank, payload)`` makes. A large array is a placeholder.
    """
    plane = DataPlane.of(rounds)
    values: list[Any] = []
    for index, (rank, note) in enumerate(zip(rounds.members, notes, strict=True)):
        layout = plane.described(note.label.data) if note.label.data else None
        if layout is None:
            values.append(decode(rank, note.payload))
        elif isinstance(layout, ArrayLayout) and not plane.is_small(layout):
            values.append(reduction.Placeholder(layout.spec, 0))
        else:
            window = plane.window_of(layout)
            assert window is not None, "all members have the small window"
            window.fence()
            at = plane.half(window) * (rounds.board.collected & 1)
            values.append(layout.read(window.memory, at + index * layout.stride))
    return values


# -- all-gather ------------------------------------------------------------------------------------


class _Gather(_PreparedCall):
    """An ``all_gather`` of values of one layout; other members may bring another one."""

    @staticmethod
    def first_of_any(sequence: RoundSequence, obj: Value, outs: Out) -> _First:
        """Return the first round for any object."""
        rounds, note = sequence.rounds, sequence.note
        if len(rounds.members) == 1:
            _check_encodable(rounds, note.label, obj)
            return note, lambda _: _fill(outs, [obj]), None
        payload = _encode(rounds, note.label, obj)
        first_note = note._replace(payload=_shorten(rounds, payload))
        return first_note, partial(_gather_any, sequence, obj, payload, outs), None

    def _read(
        self, timeout: float | None, value: Value, out: Out, notes: Sequence[Note]
    ) -> list[Any]:
        if not (self._in_slots and self._is_in_all(notes)):
            sequence = RoundSequence(self._rounds, self.note, timeout)
            return _gather_any(sequence, value, None, out, notes)
        memory, read, begin = self._memory, self.layout.read, self._begin_reading()
        values = [value] * len(notes)
        for index, at in enumerate(range(begin, begin + self._end, self.layout.stride)):
            if out is not None:
                values[index] = None if out[index] is None else read(memory, at, out[index])
            elif index != self._index:
                values[index] = read(memory, at)
        self._fence()  # read before this rank says so
        return values


def gather(
    rounds: Rounds, note: Note, obj: Value, timeout: float | None, outs: Sequence[Any] | None = None
) -> list[Any]:
    """Return every member's object, in the order of ranks; one's own is the very object.

    With `outs`, all members have such an array as `obj`: fill ``outs[i]``, contiguous, with that of
    member number i, where it is not None.
    """
    values: list[Any] = _call(_Gather, rounds, note, obj, outs, timeout)
    return values


def gather_within(sequence: RoundSequence, obj: Value) -> list[Any]:
    """Return every member's object as :func:`gather`, as a part of another call."""
    first_note, read, _ = sequence.attempt(lambda: _Gather.first_of_any(sequence, obj, None))
    values: list[Any] = read(sequence.meet(first_note))
    return values


def _gather_any(
    sequence: RoundSequence, obj: Value, payload: bytes | None, outs: Out, notes: Sequence[Note]
) -> list[Any]:
    """Return all members' objects of all kinds; `payload` is this rank's, if it is encoded."""
    rounds, me = sequence.rounds, sequence.index
    plane = DataPlane.of(rounds)
    datas = [note.label.data for note in notes]
    layouts = [plane.described(data) if data else None for data in datas]
    if any(layout is not None and not plane.is_small(layout) for layout in layouts):
        specs = [layout.spec for layout in layouts if isinstance(layout, ArrayLayout)]
        transport = sequence.attempt(plane.needed_transport)
        if len(specs) < len(layouts) or not (transport.sizes_may_differ or len(set(datas)) == 1):
            return gather_within(sequence, obj)

        def make_rooms() -> list[Any]:
            return [None if i == me else spec.plain.make() for i, spec in enumerate(specs)]

        rooms = sequence.attempt(make_rooms) if outs is None else outs
        transport.gather(sequence, obj, rooms)
        if outs is not None:
            return [obj if i == me else room for i, room in enumerate(rooms)]
        pairs = enumerate(zip(specs, rooms, strict=True))
        return [obj if i == me else spec.finish(room) for i, (spec, room) in pairs]
    sent = [*notes]
    for member, note in enumerate(notes):  # large encodings follow, one after the other
        if decode_size(note.payload) is not None:
            mine = payload if member == me else None
            rest = _broadcast_rest(sequence, member, note.payload, mine)
            sent[member] = note._replace(payload=rest)

    def decode(rank: int, payload: bytes) -> Any:
        return obj if rank == rounds.rank else _decode(sequence, rank, payload)

    def read() -> list[Any]:
        values = _values_of(rounds, sent, decode)
        values[me] = obj
        return _fill(outs, values)

    return sequence.agree(read) if any(holds_pickle(note.payload) for note in sent) else read()


def _fill(outs: Sequence[Any] | None, values: list[Any]) -> list[Any]:
    """Return `values`, which those of `outs` that are not None hold now."""
    for out, value in zip(outs or (), values, strict=False):
        if out is not None:
            out[...] = value
    return values


# -- broadcast -------------------------------------------------------------------------------------


class _Broadcast(_PreparedCall):
    """A ``broadcast`` of values of one layout.

    A receiver makes it from what the last call of its site brought. Then all notes are equal, which
    the board proves with one comparison. It may be another value this time: the source's note
    decides.
    """

    only_source_writes = True

    def first_round(self, packed: Value, value: Value, out: Out, timeout: float | None) -> _First:
        """Return the source's round."""
        rounds = self._rounds
        if DataPlane.of(rounds).reaches_all(self.layout):
            write = partial(self.write, packed)
            return self.header, lambda _: copy_into(rounds, out, value), write
        sequence = RoundSequence(rounds, self.note, timeout)
        header = self.header._replace(mark=Mark.MORE)
        return header, partial(_send, sequence, value, out, [value]), None

    @staticmethod
    def first_of_any(sequence: RoundSequence, obj: Value, out: Out) -> _First:
        """Return the source's first round for any object."""
        rounds, label = sequence.rounds, sequence.note.label
        if len(rounds.members) == 1:
            _check_encodable(rounds, label, obj)
            return sequence.note, lambda _: copy_into(rounds, out, obj), None
        payload, arrays = _pack(rounds, label, obj)
        posted = _shorten(rounds, payload)
        if arrays and posted is not payload:
            payload, arrays = _encode(rounds, label, obj), []
            posted = _shorten(rounds, payload)
        if arrays:
            return Note(label, Mark.MORE, posted), partial(_send, sequence, obj, out, arrays), None

        def send(_: Sequence[Note]) -> Any:
            _broadcast_rest(sequence, sequence.index, posted, payload)
            if holds_pickle(payload):
                sequence.meet()  # have all been able to make the object?
            return copy_into(rounds, out, obj)

        return Note(label, payload=posted), send, None

    def brings(self, note: Note) -> bool:
        """Return whether what came with the source's note has this layout."""
        return note is self.header or note.label.data == self.layout.data

    def read(self, out: Out) -> Any:
        """Return the value in the source's slot: in `out`, if that fits."""
        layout = self.layout
        place = out if out is not None and layout.fits(out) else None
        value = layout.read(self._memory, self._begin_reading(), place)
        self._fence()  # read before this rank says so
        if value is out:
            mark_written(out)
        return copy_into(self._rounds, out, value)


def broadcast(
    rounds: Rounds, note: Note, obj: Value, src: int, out: Out, timeout: float | None
) -> Any:
    """Return `src`'s object on every member, an array in `out` where that fits."""
    if src != rounds.rank:
        return _receive(rounds, note, src, out, timeout)
    return _call(_Broadcast, rounds, note, obj, out, timeout)


def _send(
    sequence: RoundSequence, obj: Value, out: Out, arrays: Sequence[Any], _: Sequence[Note]
) -> Any:
    """Send the arrays that follow the first note."""
    plane = DataPlane.of(sequence.rounds)
    plane.needed_transport().broadcast(sequence, arrays, sequence.index)
    plane.window_is_shared = True
    return copy_into(sequence.rounds, out, obj)


def _receive(rounds: Rounds, note: Note, src: int, out: Out, timeout: float | None) -> Any:
    """Return what `src` sends; most likely it is like the last object that came to this site."""
    plane = DataPlane.of(rounds)
    expected: _Broadcast | None = plane.calls.get(id(note))

    def read(notes: Sequence[Note]) -> Any:
        sent = notes[rounds.members.index(src)]
        if sent.mark or not sent.label.data:
            return _receive_any(RoundSequence(rounds, note, timeout), sent, src, out)
        call = expected
        if call is None or not call.brings(sent):
            call = _Broadcast(plane, plane.described(sent.label.data), note)
            plane.keep(id(note), call)
        return call.read(out)

    return rounds.meet(note if expected is None else expected.header, timeout, read)


def _receive_any(sequence: RoundSequence, sent: Note, src: int, out: Out) -> Any:
    """Return what follows the first note of `src`, or is in it."""
    rounds = sequence.rounds
    plane, index = DataPlane.of(rounds), rounds.members.index(src)
    payload = sent.payload
    arrays: list[Any] = []

    def make(spec: Spec) -> Any:
        arrays.append(spec.make(rounds.local_rank))
        return arrays[-1]

    def decode() -> Any:
        if not sent.label.data:
            return _decode(sequence, src, payload, make)
        layout: Any = plane.described(sent.label.data)  # of a single array
        arrays.append(out if layout.fits(out) else layout.spec.make())
        return arrays[0]

    if not sent.mark:
        payload = _broadcast_rest(sequence, index, payload)
        value = sequence.agree(decode) if holds_pickle(payload) else decode()
        return copy_into(rounds, out, value)
    transport = sequence.attempt(plane.needed_transport)
    value = sequence.attempt(decode)
    transport.broadcast(sequence, arrays, index)
    plane.window_is_shared = True
    if value is out:
        mark_written(out)
    return copy_into(rounds, out, value)


# -- all-reduce ------------------------------------------------------------------------------------


class _Reduction(_PreparedCall):
    """An ``all_reduce`` of values of one layout."""

    def __init__(self, plane: DataPlane, layout: Layout, note: Note, value: Value, op: str) -> None:
        reduction.check_value(value, op)
        super().__init__(plane, layout, note, value)
        self._op = op
        self._reduce = layout.reducer(op)

    @staticmethod
    def first_of_any(sequence: RoundSequence, value: Value, out: Out, op: str) -> _First:
        """Return the first round of the reduction of any value."""
        rounds, note = sequence.rounds, sequence.note
        reduction.check_value(value, op)
        value = reduction.detached(value)
        if len(rounds.members) == 1:
            _check_encodable(rounds, note.label, value)
            if out is not None and is_array(value) and value.dtype.kind == "f":
                return note, lambda _: copy_into(rounds, out, value), None  # of one, all are equal
            return note, lambda _: copy_into(rounds, out, _reduce(sequence, [value], op)), None
        payload, arrays = _pack(rounds, note.label, value)
        # The mark says that a round follows, in which all learn if one member cannot go on.
        mark = Mark.MORE if arrays or holds_pickle(payload) else Mark.NONE
        first_note = Note(note.label, mark, payload)
        return first_note, partial(_reduce_any, sequence, arrays, op, out), None

    def _read(self, timeout: float | None, value: Value, out: Out, notes: Sequence[Note]) -> Any:
        is_in_all = self._is_in_all(notes)
        if is_in_all and self._in_slots:
            result = self._reduce(self._memory, self._begin_reading(), out)
            self._fence()  # read before this rank says so
            return copy_into(self._rounds, out, result)
        sequence = RoundSequence(self._rounds, self.note, timeout)
        if not is_in_all:
            return _reduce_any(sequence, [value], self._op, out, notes)
        layout: Any = self.layout  # of an array
        place = None if out is None or not may_fill(out, value) else out
        result = sequence.attempt(lambda: layout.room_for(self._op, place))
        transport = DataPlane.of(self._rounds).needed_transport()
        transport.reduce(sequence, [Operand(value, result)], self._op)
        mark_written(result)
        return copy_into(self._rounds, out, result if result is out else layout.lay_out(result))


def all_reduce(
    rounds: Rounds, note: Note, value: Value, op: str, out: Out, timeout: float | None
) -> Any:
    """Return the reduction over all members, an array in `out` where that fits."""
    try:
        grad = getattr(value, "requires_grad", None)  # None: `value` is not a tensor
        if grad is not None and (grad or library_of(value) is None):
            value = reduction.detached(value)  # so a parameter is a plain tensor, frozen or not
        elif grad is None and hasattr(value, "dtype") and not is_array(value):
            value = reduction.detached(value)  # so a number of numpy has a slot, as Python's
    except BaseException as error:
        rounds.fail(note.label, error)
        raise
    return _call(_Reduction, rounds, note, value, out, timeout, op)


def _reduce_any(
    sequence: RoundSequence, mine: list[Any], op: str, out: Out, notes: Sequence[Note]
) -> Any:
    """Return the reduction of values that may differ in kind, or raise how they differ.

    `mine` are this rank's arrays that follow: its very value, if it has not encoded that.
    """
    rounds = sequence.rounds
    operands: list[Operand] = []

    def add_operand(values: list[Any]) -> Any:
        """Return the array that the reduction of these will be in."""
        own = values[sequence.index]
        if isinstance(own, reduction.Placeholder):
            own = mine[own.number]
        operands.append(Operand(own, reduction.empty_result(own, op)))  # laid out as one's own
        return operands[-1].result

    decoded: dict[bytes, Any] = {}

    def decode(rank: int, payload: bytes) -> Any:
        if payload not in decoded:  # equal bytes are decoded once
            numbered = reduction.number_arrays()
            decoded[payload] = _decode(sequence, rank, payload, numbered)
        return decoded[payload]

    def combine() -> Any:
        values = _values_of(rounds, notes, decode)
        return _reduce(sequence, values, op, add_operand)

    more = any(note.mark for note in notes)
    result = sequence.attempt(combine) if more else combine()
    if operands:
        DataPlane.of(rounds).needed_transport().reduce(sequence, operands, op)
    elif more:
        sequence.meet()
    return copy_into(rounds, out, result)


def _reduce(
    sequence: RoundSequence, values: list[Any], op: str, out_of_band: Callable[..., Any] = list
) -> Any:
    """Return the reduction of `values`; an error is the same on all ranks, and names the call."""
    rounds, here = sequence.rounds, str(sequence.note.label)
    try:
        return reduction.reduce(values, op, rounds.members, out_of_band, own=sequence.index)
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
        rounds.shared_error = own
        raise own from cause


def _is_of_reduction(error: BaseException) -> bool:
    """Return whether the reduction itself has raised `error`, and not a signal handler in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__")) if trace is not None else ""
    return module.partition(".")[0] in ("syncprims", "numpy", "torch")


# -- the caller's own array ------------------------------------------------------------------------


def copy_into(rounds: Rounds, out: Out, value: Value) -> Any:
    """Return `out`, now holding `value`; or `value`, if `out` is None or has been filled.

    That `out` does not fit is this rank's own error: the call itself has succeeded.

    :raises TypeError, ValueError: if `out` cannot hold it.
    :raises RuntimeError: if torch cannot write it there, as into a sparse tensor.
    """
    if out is None or out is value:
        return value
    misfit = _find_misfit(out, value)
    if misfit is not None:
        rounds.shared_error = misfit
        raise misfit
    if is_array(out):
        out[...] = value
        return out
    try:
        out.detach().copy_(value)
    except RuntimeError as error:
        if type(error) is RuntimeError:  # of torch
            rounds.shared_error = error
        raise
    return out


def _find_misfit(out: Out, value: Value) -> Exception | None:
    """Return why `out` cannot hold `value`, None if it can.

    It is returned, since an exception in here would come from outside, as from a signal handler.
    """
    if not (is_array(out) or is_tensor(out)):
        kind = type(out).__name__
        return TypeError(f"out is a {kind}; it takes a numpy array or a torch tensor")
    if not (is_array(value) or is_tensor(value)):
        kind = type(value).__name__
        return TypeError(f"out was given, and what arrived is a {kind}, no array")
    alike = is_array(out) == is_array(value) and out.dtype == value.dtype
    if not alike or out.shape != value.shape:
        return ValueError(f"out is {_with_article(out)}; what arrived is {_with_article(value)}")
    if is_array(out):
        if not out.flags.writeable:
            return ValueError("out is read-only; give an array that can be written to")
        steps = out.strides
    else:
        if out.is_meta:
            return ValueError("out is on the meta device; give a tensor that has memory")
        steps = out.stride() if str(out.layout) == "torch.strided" else ()
    if any(step == 0 and size > 1 for step, size in zip(steps, out.shape, strict=False)):
        return ValueError("items of out share memory; give an array that is not expanded")
    return None


def _with_article(value: Value) -> str:
    text = reduction.describe(value)
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"
