"""Objects between ranks: encoded once; arrays of some size go beside, through shared memory."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims._protocol.round_sequence import Steps
from syncprims.errors import EncodingError, RankMismatch, SyncError
from syncprims.interface import Note

from . import codec, reduction
from .arrays import Spec, filled, fits, may_fill
from .shared_memory import Job
from .transport import Carriage

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncprims._protocol.rounds import Rounds
    from syncprims.interface import Label


#: Why a rank may be unable to take what is sent: said to the others in the round. (Torch says
#: RuntimeError where memory is short.) Anything else comes from outside, and breaks the group.
_CANNOT = (SyncError, OSError, MemoryError, RuntimeError)
#: What Python, numpy and torch raise where numbers cannot be reduced: the same on all ranks.
_NO_RESULT = (TypeError, ValueError, OverflowError, ArithmeticError)


#: In place of an object's encoding: so many bytes, which follow as an array.
_WHOLE = struct.Struct("<cQ?")  # tag, bytes, whether other arrays follow those
_TAG = b"W"


class Package(NamedTuple):
    """An object on its way."""

    payload: bytes
    arrays: list[Any]  #: that go beside it
    carriage: Carriage | None  #: and what carries them


def encode(rounds: Rounds, label: Label, obj: object, *, canonical: bool = False) -> bytes:
    """Return `obj` as bytes; if it cannot travel, the others are told in this very round."""
    try:
        return codec.encode(obj, allow_pickle=rounds.settings.pickle, canonical=canonical)
    except EncodingError as error:
        rounds.fail(label, _at(error, rounds, label))
        raise


def check(rounds: Rounds, label: Label, obj: object) -> None:
    """Accept what could travel, in a world where it need not.

    :raises EncodingError: as where it does.
    """
    try:
        codec.encode(obj, allow_pickle=rounds.settings.pickle, beside=[])
    except EncodingError as error:
        raise _at(error, rounds, label) from error.__cause__


def _at(error: EncodingError, rounds: Rounds, label: Label) -> EncodingError:
    """Let the error say in which call it is."""
    error.call, error.rank = str(label), rounds.rank
    error.args = (f"{label}: {error}",)
    return error


def decode(rounds: Rounds, payload: bytes, beside: Callable[[Spec], Any] | None = None) -> Any:
    """Return the object in a payload; arrays that go beside it are `beside`'s."""
    allow_pickle, local_rank = rounds.settings.pickle, rounds.local_rank
    return codec.decode(payload, allow_pickle=allow_pickle, beside=beside, local_rank=local_rank)


def gather(rounds: Rounds, label: Label, obj: Any, timeout: float | None) -> list[Any]:
    """Return every member's object, in rank order; one's own is the very object."""
    payload = encode(rounds, label, obj)
    if rounds.note_limit is None:
        payloads = [note.payload for note in rounds.meet(Note(label, payload=payload), timeout)]
    else:
        carriage = _carriage(rounds)
        payloads = rounds.as_one(
            label, lambda: _gather(Steps(rounds, timeout), rounds, label, payload, carriage)
        )
    return [
        obj if rank == rounds.rank else decode(rounds, payload)
        for rank, payload in zip(rounds.members, payloads, strict=True)
    ]


def _gather(
    steps: Steps, rounds: Rounds, label: Label, payload: bytes, carriage: Carriage | None
) -> list[bytes]:
    """Return all members' payloads; large ones follow as arrays, one member's after the other's."""
    large = carriage is not None and len(payload) > (rounds.note_limit or 0)
    steps.post(Note(label, large, _WHOLE.pack(_TAG, len(payload), False) if large else payload))
    found: list[bytes] = []
    for member, note in enumerate(steps.reach(steps.posted)):
        found.append(note.payload)
        if note.flag:
            assert carriage is not None, "one member has one"
            mine = payload if member == steps.index else None
            found[-1] = _carry_whole(steps, Note(label), carriage, note.payload, mine, member)
    return found


def _carry_whole(
    steps: Steps, step: Note, carriage: Carriage, header: bytes, mine: bytes | None, src: int
) -> bytes:
    """Return the payload that `header` stands for; `mine` is sent, if it is this rank's."""
    import numpy

    if mine is not None:
        carriage.send(steps, step, [numpy.frombuffer(bytearray(mine), numpy.uint8)])
        return mine
    whole = numpy.empty(_WHOLE.unpack(header)[1], numpy.uint8)
    carriage.receive(steps, step, [whole], src)
    return whole.tobytes()


def _carriage(rounds: Rounds) -> Carriage | None:
    carrier, devices = rounds.carriers()
    return None if carrier is None else Carriage(carrier, devices)


def _pack(rounds: Rounds, label: Label, obj: object) -> Package:
    arrays: list[Any] = []
    limit = rounds.note_limit
    carriage = None
    try:
        payload = codec.encode(obj, allow_pickle=rounds.settings.pickle, beside=arrays)
        if arrays or (limit is not None and len(payload) > limit):
            carriage = _carriage(rounds)
    except _CANNOT as error:
        if isinstance(error, EncodingError):
            _at(error, rounds, label)
        rounds.fail(label, error)
        raise
    if arrays and carriage is None:
        return Package(encode(rounds, label, obj), [], None)
    return Package(payload, arrays, carriage)


# -- broadcast ---------------------------------------------------------------------------------


def broadcast(
    rounds: Rounds, note: Note, obj: Any, src: int, out: Any, timeout: float | None
) -> Any:
    """Return `src`'s object on every member, an array in `out` where that fits."""
    if src == rounds.rank:
        package = _pack(rounds, note.label, obj)
        rounds.as_one(note.label, lambda: _send(Steps(rounds, timeout), rounds, note, package))
        return obj
    return rounds.as_one(
        note.label, lambda: _receive(Steps(rounds, timeout), rounds, note, src, out)
    )


def _send(steps: Steps, rounds: Rounds, note: Note, package: Package) -> None:
    payload, arrays, carriage = package
    limit = rounds.note_limit
    whole = carriage is not None and limit is not None and len(payload) > limit
    header = _WHOLE.pack(_TAG, len(payload), bool(arrays)) if whole else payload
    steps.post(Note(note.label, carriage is not None, header))
    steps.reach(steps.posted)
    if carriage is not None:
        if whole:
            _carry_whole(steps, note, carriage, header, payload, steps.index)
        if arrays:
            carriage.send(steps, note, arrays)


def _receive(steps: Steps, rounds: Rounds, note: Note, src: int, out: Any) -> Any:
    steps.post(note)
    index = rounds.members.index(src)
    sent = steps.reach(steps.posted)[index]
    if not sent.flag:
        return decode(rounds, sent.payload)
    arrays: list[Any] = []
    payload, follows = sent.payload, True
    alone = payload[:1] == codec.BESIDE  # the object is an array, and no more

    def make(spec: Spec) -> Any:
        arrays.append(out if alone and fits(out, spec) else spec.make(rounds.local_rank))
        return arrays[-1]

    try:
        carriage = _carriage(rounds)
        assert carriage is not None, "the source has one"
        if payload[:1] == _TAG:
            follows = _WHOLE.unpack(payload)[2]
            payload = _carry_whole(steps, note, carriage, payload, None, index)
        value = decode(rounds, payload, make)
    except _CANNOT as error:
        if follows:
            steps.fail(note.label, error)
        raise
    if arrays:
        carriage.receive(steps, note, arrays, index)
    return filled(out) if value is out else value


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
    steps = _Reduction(rounds, note, op, out, package)
    return rounds.as_one(note.label, lambda: steps.run(Steps(rounds, timeout), value))


class _Reduction:
    """One all-reduce of one rank."""

    def __init__(self, rounds: Rounds, note: Note, op: str, out: Any, package: Package) -> None:
        self._rounds = rounds
        self._note = note
        self._op = op
        self._out = out
        self._package = package
        self._jobs: list[tuple[Any, Any]] = []  # own array, and where its reduction goes

    def run(self, steps: Steps, value: Any) -> Any:
        payload, arrays, carriage = self._package
        steps.post(Note(self._note.label, bool(arrays), payload))
        notes = steps.reach(steps.posted)
        try:
            result = self._reduce(notes, value)
        except RankMismatch:
            raise  # on all
        except (*_CANNOT, *_NO_RESULT) as error:
            if arrays:
                steps.fail(self._note.label, error)
            self._rounds.told = error  # or they need not be: the round is whole
            raise
        if carriage is not None and arrays:
            jobs = [Job(mine, target) for mine, target in self._jobs]
            carriage.reduce(steps, self._note, jobs, self._op)
            if result is self._out:
                filled(result)
        return result

    def _reduce(self, notes: Any, value: Any) -> Any:
        """Reduce what came in the notes, and make room for the arrays beside them."""
        rounds, (payload, arrays, _) = self._rounds, self._package
        if arrays and arrays[0] is value and all(other.payload == payload for other in notes):
            return self._target(value)  # one array, alike on all: nothing to look for
        seen: dict[bytes, Any] = {}  # equal bytes are read once
        if not arrays:
            seen[payload] = value
        for other in notes:
            if other.payload not in seen:
                seen[other.payload] = self._read(other.payload)
        values = [seen[other.payload] for other in notes]
        try:
            return reduction.reduce(values, self._op, rounds.members, self._take)
        except RankMismatch as error:
            here = str(self._note.label)
            members = list(rounds.members)
            raise RankMismatch(
                f"{here}: {error}", rank=rounds.rank, call=here, arrived=members
            ) from None
        except _NO_RESULT as error:
            # The builtin one: numpy's own cannot be made from a text.
            kind = next(one for one in _NO_RESULT if one in type(error).__mro__)
            raise kind(f"{self._note.label}: these values have no {self._op}: {error}") from error

    def _read(self, payload: bytes) -> Any:
        count = 0

        def place(spec: Spec) -> reduction.Beside:
            nonlocal count
            count += 1
            return reduction.Beside(spec, count - 1)

        return decode(self._rounds, payload, place)

    def _take(self, values: list[reduction.Beside]) -> Any:
        """Return the array that the reduction of these will be in."""
        place = values[self._rounds.members.index(self._rounds.rank)]
        return self._target(self._package.arrays[place.number])

    def _target(self, mine: Any) -> Any:
        """Make room for the reduction of an array, and note that it is to be done."""
        out, op = self._out, self._op
        alone = self._package.payload[:1] == codec.BESIDE  # the value is an array, and no more
        if not alone or not reduction.fits_result(out, mine, op) or not may_fill(out, mine):
            out = reduction.empty_result(mine, op)
        self._jobs.append((mine, out))
        return out
