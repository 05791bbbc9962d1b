"""Objects between ranks: encoded once; arrays of some size go beside, through shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from . import codec, reduction
from .arrays import Spec, filled, fits, may_fill
from .errors import EncodingError, RankMismatch, SyncError
from .interface import Note
from .steps import Steps

if TYPE_CHECKING:
    from .interface import Label, Window
    from .rounds import Rounds


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
    except _CANNOT as error:
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
        rounds.as_one(note.label, lambda: _send(Steps(rounds, timeout), note, package))
        return obj
    return rounds.as_one(
        note.label, lambda: _receive(Steps(rounds, timeout), rounds, note, src, out)
    )


def _send(steps: Steps, note: Note, package: Package) -> None:
    follows = bool(package.arrays)
    steps.post(Note(note.label, follows, package.payload))
    steps.reach(steps.posted)
    if package.window is not None:
        from . import bulk  # not before an array comes: it needs numpy

        bulk.send(steps, note, package.window, package.arrays)


def _receive(steps: Steps, rounds: Rounds, note: Note, src: int, out: Any) -> Any:
    steps.post(note)
    sent = steps.reach(steps.posted)[rounds.members.index(src)]
    if not sent.flag:
        return decode(rounds, sent.payload)
    arrays: list[Any] = []
    alone = sent.payload[:1] == codec.BESIDE  # the object is an array, and no more

    def make(spec: Spec) -> Any:
        arrays.append(out if alone and fits(out, spec) else spec.make())
        return arrays[-1]

    try:
        value = codec.decode(sent.payload, allow_pickle=rounds.settings.pickle, beside=make)
        window = rounds.window()
        assert window is not None, "the source has one"
    except _CANNOT as error:
        steps.fail(note.label, error)
        raise
    from . import bulk

    bulk.receive(steps, note, window, arrays)
    return filled(out) if value is out else value


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
        payload, arrays, window = self._package
        steps.post(Note(self._note.label, bool(arrays), payload))
        notes = steps.reach(steps.posted)
        try:
            result = self._reduce(notes, value)
        except RankMismatch:
            raise  # on all
        except _CANNOT as error:
            if arrays:
                steps.fail(self._note.label, error)
            raise
        if window is not None:
            from . import bulk  # not before an array comes: it needs numpy

            jobs = [bulk.Job(mine, target) for mine, target in self._jobs]
            bulk.reduce(steps, self._note, window, jobs, self._op)
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
        return self._target(self._package.arrays[place.number])

    def _target(self, mine: Any) -> Any:
        """Make room for the reduction of an array, and note that it is to be done."""
        out, op = self._out, self._op
        alone = self._package.payload[:1] == codec.BESIDE  # the value is an array, and no more
        if not alone or not reduction.fits_result(out, mine, op) or not may_fill(out, mine):
            out = reduction.empty_result(mine, op)
        self._jobs.append((mine, out))
        return out
