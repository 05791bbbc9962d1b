"""How the arrays of a call travel between the members of a board."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from .arrays import is_on_device, on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncprims._protocol.round_sequence import RoundSequence
    from syncprims.interface import DeviceEngine


class Operand(NamedTuple):
    """One array to reduce, and where its reduction goes."""

    mine: Any
    result: Any  #: contiguous


class Transport(ABC):
    """Carries arrays. All members make the same call at one time, for arrays of the same specs.

    The rounds of `sequence` show that all are there and that all have the data: a member that dies,
    fails or differs raises on the others as in any round.
    """

    @abstractmethod
    def send(self, sequence: RoundSequence, arrays: Sequence[Any]) -> None:
        """Send `arrays` to all other members, which call :meth:`receive`."""

    @abstractmethod
    def receive(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill the contiguous `arrays` with what member number `src` sends."""

    @abstractmethod
    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members.

        Members reduce one part each, in the order of ranks: as one rank alone would have.
        """


class DeviceTransport(Transport):
    """Carries arrays of hosts and of devices: from device to device where an engine can.

    All others pass through the hosts' memory, and `host` carries them there.
    """

    def __init__(self, host: Transport, engine: DeviceEngine | None) -> None:
        self._host = host
        self._engine = engine

    def send(self, sequence: RoundSequence, arrays: Sequence[Any]) -> None:
        """Send `arrays` to all other members, which call :meth:`receive`."""
        if rest := [on_host(array) for array in arrays if not self._engine_for(array)]:
            self._host.send(sequence, rest)
        self._broadcast(sequence, arrays, sequence.index)

    def receive(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        """Fill the contiguous `arrays` with what member number `src` sends."""
        if rest := [array for array in arrays if not self._engine_for(array)]:
            here = [_host_room(array) for array in rest]
            self._host.receive(sequence, here, src)
            _copy_back(rest, here)
        self._broadcast(sequence, arrays, src)

    def _broadcast(self, sequence: RoundSequence, arrays: Sequence[Any], src: int) -> None:
        direct = [(array, engine) for array in arrays if (engine := self._engine_for(array))]
        if direct:
            sequence.meet()  # all are here, and alive: what is queued now will not wait for long
        for array, engine in direct:
            engine.broadcast(array.detach().contiguous(), src)

    def reduce(self, sequence: RoundSequence, operands: Sequence[Operand], op: str) -> None:
        """Fill the results of all operands, with the same bits on all members."""
        if rest := [one for one in operands if not self._engine_for(one.mine, op)]:
            here = [Operand(on_host(one.mine), _host_room(one.result)) for one in rest]
            self._host.reduce(sequence, here, op)
            _copy_back([one.result for one in rest], [one.result for one in here])
        direct = [(one, engine) for one in operands if (engine := self._engine_for(one.mine, op))]
        if direct:
            sequence.meet()
        for one, engine in direct:
            one.result.copy_(one.mine)
            engine.all_reduce(one.result, op)

    def _engine_for(self, array: Any, op: str | None = None) -> DeviceEngine | None:
        engine = self._engine
        return engine if engine and is_on_device(array) and engine.takes(array, op) else None


def _host_room(target: Any) -> Any:
    """Return `target`, or, for one on a device, room for it in this host's memory."""
    if not is_on_device(target):
        return target
    import torch

    return torch.empty(target.shape, dtype=target.dtype)


def _copy_back(targets: Sequence[Any], here: Sequence[Any]) -> None:
    for target, arrived in zip(targets, here, strict=True):
        if arrived is not target:
            target.detach().copy_(arrived)
