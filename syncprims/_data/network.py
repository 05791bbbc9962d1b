"""Arrays in bulk where members share no memory: an engine carries them, a piece at a time.

The counterpart of the module on the window, called in the same places. Rounds before and after say
that all are there and that all have it: an engine by itself would wait for a dead peer for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays import flat, raw
from .kinds import is_array
from .reduction import combine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims._protocol.round_sequence import Steps
    from syncprims.interface import Engine, Note

    from .shared_memory import Job

_PIECE = 16 << 20  # bytes of one's own array that are reduced at a time
_MOST = 256 << 20  # bytes that are broadcast at a time


def send(steps: Steps, step: Note, engine: Engine, arrays: Sequence[Any]) -> None:
    """Pass `arrays` to all members, who call :func:`receive` for such."""
    _broadcast(steps, step, engine, arrays, steps.index)


def receive(steps: Steps, step: Note, engine: Engine, arrays: Sequence[Any], src: int) -> None:
    """Fill the contiguous `arrays` with what member number `src` sends."""
    _broadcast(steps, step, engine, arrays, src)


def _broadcast(steps: Steps, step: Note, engine: Engine, arrays: Sequence[Any], src: int) -> None:
    def carry() -> None:
        for array in arrays:
            data = raw(flat(array))
            for at in range(0, len(data), _MOST):
                engine.broadcast(data[at : at + _MOST], src)

    _in_step(steps, step, engine, carry)


def reduce(steps: Steps, step: Note, engine: Engine, jobs: Sequence[Job], op: str) -> None:
    """Fill the results of all jobs, on all members alike.

    Each member reduces its share, always in the order of ranks: so all hold the same bits, and the
    same that one rank would have found by itself.
    """

    def carry() -> None:
        for job in jobs:
            mine, result = flat(job.mine), flat(job.result)
            most = max(1, _PIECE // mine.itemsize)
            for begin in range(0, len(mine), most):
                piece = slice(begin, begin + most)
                _reduce(engine, len(steps.members), steps.index, mine[piece], result[piece], op)

    _in_step(steps, step, engine, carry)


def _in_step(steps: Steps, step: Note, engine: Engine, carry: Callable[[], None]) -> None:
    """Have the data carried once all are there, and return once all have it.

    An error in there breaks the group: what others wait for in theirs will not come.
    """
    steps.agree(step)
    steps.stand_by(carry, engine.close)
    steps.agree(step)


def _reduce(engine: Engine, members: int, index: int, mine: Any, result: Any, op: str) -> None:
    """Reduce a piece: exchange shares, combine one's own, and gather the combined."""
    share = -(-len(mine) // members)
    padded = _like(mine, share * members)
    padded[: len(mine)] = mine
    padded[len(mine) :] = 0
    theirs = _like(mine, share * members)
    engine.exchange(raw(padded), raw(theirs))
    combined = _like(result, share)
    parts = [theirs[member * share : (member + 1) * share] for member in range(members)]
    parts[index] = padded[index * share : (index + 1) * share]
    combine(parts, op, combined)
    whole = _like(result, share * members)
    engine.gather(raw(combined), raw(whole))
    result[:] = whole[: len(result)]


def _like(vector: Any, items: int) -> Any:
    """Return an array or tensor of so many items of the same dtype, its contents not set."""
    if is_array(vector):
        import numpy

        return numpy.empty(items, vector.dtype)
    import torch

    return torch.empty(items, dtype=vector.dtype)
