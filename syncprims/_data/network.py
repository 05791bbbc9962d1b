"""Arrays between members that share no memory: an engine carries them, a piece at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays import empty_vector, flat, raw
from .reduction import combine
from .transport import Operand, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims._protocol.round_sequence import RoundSequence
    from syncprims.interface import Engine

_REDUCED_AT_ONCE = 16 << 20  # bytes of one's own array
_BROADCAST_AT_ONCE = 256 << 20  # bytes


class EngineTransport(Transport):
    """Carries arrays of the hosts' memory through an engine.

    Rounds before and after show that all are there and that all have the data: an engine by itself
    would wait for a dead peer for ever.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def send(self, sequence: RoundSequence, arrays: Sequence[Any]) -> None:
        """Send `arrays` to all other members, which call :meth:`receive`."""
        self.receive(sequence, arrays, sequence.index)

    def receive(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill the contiguous `arrays` with what member number `src` sends."""

        def carry() -> None:
            for array in arrays:
                data = raw(flat(array))
                for at in range(0, len(data), _BROADCAST_AT_ONCE):
                    self._engine.broadcast(data[at : at + _BROADCAST_AT_ONCE], src)

        self._between_rounds(sequence, carry)

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members."""

        def carry() -> None:
            for operand in operands:
                mine, result = flat(operand.mine), flat(operand.result)
                most = max(1, _REDUCED_AT_ONCE // mine.itemsize)
                for begin in range(0, len(mine), most):
                    piece = Operand(mine[begin : begin + most], result[begin : begin + most])
                    self._reduce(piece, op, sequence.index, len(sequence.rounds.members))

        self._between_rounds(sequence, carry)

    def _between_rounds(self, sequence: RoundSequence, carry: Callable[[], None]) -> None:
        """Call ``carry()`` once all are there, and return once all have the data.

        An error in it breaks the group: what others wait for in theirs will not come.
        """
        sequence.meet()
        sequence.run_watched(carry, self._engine.close)
        sequence.meet()

    def _reduce(self, piece: Operand, op: str, index: int, members: int) -> None:
        """Reduce a piece: exchange parts, combine one's own, and gather the combined ones."""
        mine, result = piece
        part = -(-len(mine) // members)
        padded = empty_vector(mine, part * members)
        padded[: len(mine)] = mine
        padded[len(mine) :] = 0
        theirs = empty_vector(mine, part * members)
        self._engine.exchange(raw(padded), raw(theirs))
        combined = empty_vector(result, part)
        parts = [theirs[member * part : (member + 1) * part] for member in range(members)]
        parts[index] = padded[index * part : (index + 1) * part]
        combine(parts, op, combined)
        whole = empty_vector(result, part * members)
        self._engine.gather(raw(combined), raw(whole))
        result[:] = whole[: len(result)]
