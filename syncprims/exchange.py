"""Objects between ranks: encoded once; arrays of some size go beside, through shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import codec, reduction
from .arrays import Spec, fits, memory_overlaps
from .errors import EncodingError, RankMismatch, SyncError
from .interface import Note

if TYPE_CHECKING:
    from .interface import Label, Window
    from .rounds import Rounds, Turn


#: Why a rank may be unable to take what is sent: said to the others in the round. (Torch says
#: RuntimeError where memory is short.) Anything else comes from outside, and breaks the group.
_CANNOT = (SyncError, OSError, MemoryError, RuntimeError)


class Package(NamedTuple):
    """An object on its way."""

    payload: bytes
    arrays: list[Any]  #: that go beside it
    window: Window | None  #: and what they pass through


def encode(rounds: Rounds, label: Label, obj: object, *, canonical: bool = False) -> bytes:
    """Return `obj` as bytes; if it cannot travel, the others are told in this very round."""
    try:
        return codec.encode(obj, allow_pickle=rounds.settings.pickle, canonical=canonical)
    except EncodingError as error:
        rounds.fail(label, error)
        raise


def decode(rounds: Rounds, payload: bytes) -> Any:
    """Return the object in a payload."""
    return codec.decode(payload, allow_pickle=rounds.settings.pickle)


def gather(rounds: Rounds, label: Label, obj: Any, timeout: float | None) -> list[Any]:
    """Return every member's object, in rank order; one's own is the very object."""
    payload = encode(rounds, label, obj)
    notes = rounds.meet(Note(label, payload=payload), timeout)
    return [
        obj if rank == rounds.rank else decode(rounds, note.payload)
        for rank, note in zip(rounds.members, notes, strict=True)
    ]


def _pack(rounds: Rounds, label: Label, obj: object) -> Package:
    arrays: list[Any] = []
    window = None
    try:
        payload = codec.encode(obj, allow_pickle=rounds.settings.pickle, beside=arrays)
        if arrays:
            window = rounds.window()
    except (EncodingError, OSError) as error:
        rounds.fail(label, error)
        raise
    if arrays and window is None:
        return Package(encode(rounds, label, obj), [], None)
    return Package(payload, arrays, window)


# -- broadcast ---------------------------------------------------------------------------------


def broadcast(
    rounds: Rounds, note: Note, obj: Any, src: int, out: Any, timeout: float | None
) -> Any:
    """Return `src`'s object on every member, an array in `out` where that fits."""
    if src == rounds.rank:
        package = _pack(rounds, note.label, obj)
        rounds.as_one(note.label, timeout, lambda turn: _send(turn, note, package))
        return obj
    return rounds.as_one(note.label, timeout, lambda turn: _receive(turn, rounds, note, src, out))


def _send(turn: Turn, note: Note, package: Package) -> None:
    follows = bool(package.arrays)
    turn.post(Note(note.label, follows, package.payload))
    turn.reach(turn.posted)
    if package.window is not None:
        from . import bulk  # not before an array comes: it needs numpy

        bulk.send(turn, note, package.window, package.arrays)


def _receive(turn: Turn, rounds: Rounds, note: Note, src: int, out: Any) -> Any:
    turn.post(note)
    sent = turn.reach(turn.posted)[rounds.members.index(src)]
    if not sent.flag:
        return decode(rounds, sent.payload)
    arrays: list[Any] = []

    def make(spec: Spec) -> Any:
        arrays.append(out if not arrays and fits(out, spec) else spec.make())
        return arrays[-1]

    try:
        value = codec.decode(sent.payload, allow_pickle=rounds.settings.pickle, beside=make)
        window = rounds.window()
        assert window is not None, "the source has one"
    except _CANNOT as error:
        turn.fail(note.label, error)
        raise
    from . import bulk

    bulk.receive(turn, note, window, arrays)
    return value


# -- all-reduce --------------------------------------------------------------------------------


def all_reduce(
    rounds: Rounds, note: Note, value: Any, op: str, out: Any, timeout: float | None
) -> Any:
    """Return the reduction over all members, an array in `out` where that fits."""
    try:
        reduction.check_value(value)
    except TypeError as error:
        rounds.fail(note.label, error)
        raise
    value = reduction.detached(value)
    package = _pack(rounds, note.label, value)
    steps = _Reduction(rounds, note, op, out, package)
    return rounds.as_one(note.label, timeout, lambda turn: steps.run(turn, value))


class _Reduction:
    """One all-reduce of one rank."""

    def __init__(self, rounds: Rounds, note: Note, op: str, out: Any, package: Package) -> None:
        self._rounds = rounds
        self._note = note
        self._op = op
        self._out = out
        self._package = package
        self._jobs: list[tuple[Any, Any]] = []  # own array, and where its reduction goes

    def run(self, turn: Turn, value: Any) -> Any:
        payload, arrays, window = self._package
        turn.post(Note(self._note.label, bool(arrays), payload))
        notes = turn.reach(turn.posted)
        try:
            result = self._reduce(notes, value)
        except RankMismatch:
            raise  # on all
        except _CANNOT as error:
            if arrays:
                turn.fail(self._note.label, error)
            raise
        if window is not None:
            from . import bulk  # not before an array comes: it needs numpy

            jobs = [bulk.Job(mine, target) for mine, target in self._jobs]
            bulk.reduce(turn, self._note, window, jobs, self._op)
        return result

    def _reduce(self, notes: Any, value: Any) -> Any:
        """Reduce what came in the notes, and make room for the arrays beside them."""
        rounds = self._rounds
        seen: dict[bytes, Any] = {}  # equal bytes are read once
        if not self._package.arrays:
            seen[self._package.payload] = value
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

    def _read(self, payload: bytes) -> Any:
        count = 0

        def place(spec: Spec) -> reduction.Beside:
            nonlocal count
            count += 1
            return reduction.Beside(spec, count - 1)

        allow_pickle = self._rounds.settings.pickle
        return codec.decode(payload, allow_pickle=allow_pickle, beside=place)

    def _take(self, values: list[reduction.Beside]) -> Any:
        """Return the array that the reduction of these will be in."""
        place = values[self._rounds.members.index(self._rounds.rank)]
        mine = self._package.arrays[place.number]
        target, out = None, self._out
        if not self._jobs and out is not None:
            like = reduction.result_spec(mine, self._op)
            # Half over the other, it would be overwritten before it is read.
            if fits(out, like) and (out is mine or not memory_overlaps(out, mine)):
                target = out
        if target is None:
            target = reduction.empty_result(mine, self._op)
        self._jobs.append((mine, target))
        return target
