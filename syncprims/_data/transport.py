"""How the arrays of a call travel: through shared memory, an engine, or from device to device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncprims.interface import Window

from .arrays import on_host
from .devices import is_on_device
from .kinds import is_tensor
from .shared_memory import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncprims._protocol.round_sequence import Steps
    from syncprims.interface import DeviceEngine, Engine, Note


class Carriage:
    """What carries arrays between the members of a board; all choose alike for each array."""

    def __init__(self, carrier: Window | Engine, devices: DeviceEngine | None) -> None:
        self._carrier = carrier
        self._devices = devices

    def send(self, steps: Steps, step: Note, arrays: Sequence[Any]) -> None:
        """Pass `arrays` to all members, who call :meth:`receive` for such."""
        host = [on_host(array) for array in arrays if not self._is_direct(array)]
        if host and isinstance(self._carrier, Window):
            from . import shared_memory

            shared_memory.send(steps, step, self._carrier, host)
        elif host:
            from . import network

            network.send(steps, step, self._carrier, host)  # type: ignore[arg-type]
        self._broadcast_direct(steps, step, arrays, steps.index)

    def receive(self, steps: Steps, step: Note, arrays: Sequence[Any], src: int) -> None:
        """Fill the contiguous `arrays` with what member number `src` sends."""
        targets = [array for array in arrays if not self._is_direct(array)]
        host = [_host_like(target) for target in targets]
        if host and isinstance(self._carrier, Window):
            from . import shared_memory

            shared_memory.receive(steps, step, self._carrier, host)
        elif host:
            from . import network

            network.receive(steps, step, self._carrier, host, src)  # type: ignore[arg-type]
        _bring_home(targets, host)
        self._broadcast_direct(steps, step, arrays, src)

    def reduce(self, steps: Steps, step: Note, jobs: Sequence[Job], op: str) -> None:
        """Fill the results of all jobs, on all members alike."""
        direct = [job for job in jobs if self._is_direct(job.mine, op)]
        rest = [job for job in jobs if not self._is_direct(job.mine, op)]
        host = [Job(on_host(job.mine), _host_like(job.result)) for job in rest]
        if host and isinstance(self._carrier, Window):
            from . import shared_memory

            shared_memory.reduce(steps, step, self._carrier, host, op)
        elif host:
            from . import network

            network.reduce(steps, step, self._carrier, host, op)  # type: ignore[arg-type]
        _bring_home([job.result for job in rest], [job.result for job in host])
        if direct:
            steps.agree(step)  # all are here, and alive: what is queued now will not wait for long
            assert self._devices is not None
            for job in direct:
                job.result.copy_(job.mine)
                self._devices.all_reduce(job.result, op)

    def _broadcast_direct(self, steps: Steps, step: Note, arrays: Sequence[Any], src: int) -> None:
        direct = [array.detach() for array in arrays if self._is_direct(array)]
        if direct:
            steps.agree(step)
            assert self._devices is not None
            for tensor in direct:
                self._devices.broadcast(tensor.contiguous(), src)

    def _is_direct(self, array: Any, op: str | None = None) -> bool:
        return (
            self._devices is not None
            and is_tensor(array)
            and is_on_device(array)
            and self._devices.takes(array, op)
        )


def _host_like(target: Any) -> Any:
    """Return `target`, or, for one on a device, room for it in this host's memory."""
    if not is_tensor(target) or not is_on_device(target):
        return target
    import torch

    return torch.empty(target.shape, dtype=target.dtype)


def _bring_home(targets: Sequence[Any], host: Sequence[Any]) -> None:
    for target, arrived in zip(targets, host, strict=True):
        if arrived is not target:
            target.detach().copy_(arrived)
