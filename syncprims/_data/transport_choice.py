"""Which transport carries the arrays of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .shared_memory import SharedMemoryTransport
from .transport import DeviceTransport, EngineTransport, Transport

if TYPE_CHECKING:
    from syncprims._protocol.rounds import Rounds


def find_transport(rounds: Rounds) -> Transport | None:
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
