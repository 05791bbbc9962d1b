"""Which hosts share a directory: those that see the mark that one of them leaves there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from syncprims._protocol.rounds import RoundSequence
from syncprims.errors import ConfigurationError


def number_file_systems(sequence: RoundSequence, path: str, nodes: list[int]) -> list[int]:
    """Return a number for each rank: the same for those to which `path` is one directory.

    The first rank of each node leaves a mark. Thus nodes also find each other if they share what
    rank 0 does not see. No mark remains, also after an exception.

    :param nodes: the node of each rank.
    :raises ConfigurationError: on a rank that cannot read the directory, and on rank 0 if it cannot
        write there. The others raise `PeerFailed`.
    """
    folder, rank, note = Path(path), sequence.index, sequence.note
    node = nodes[rank]
    leads = nodes.index(node) == rank
    token = sequence.meet(note._replace(payload=os.urandom(8)))[0].payload.hex()  # of this call
    marks = [folder / f".syncprims-{token}-{number}" for number in range(max(nodes) + 1)]
    to_remove = marks  # those of other nodes too: their ranks may have been killed

    def leave_mark() -> None:
        if not leads:
            return
        try:
            os.scandir(folder).close()  # raises if it cannot be read
            marks[node].touch()
        except OSError as error:
            may_not_write = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            if rank and may_not_write and str(error.filename) == str(marks[node]):
                return  # it may still see the mark of another host
            raise ConfigurationError(
                f"main_first(at={path!r}): rank {rank} on host {socket.gethostname()!r} "
                f"cannot use this directory: {error}; pass one that exists on every host, and in "
                f"which rank 0 may write"
            ) from error

    def look() -> bytes:
        if not leads:
            return b""
        return b"%d" % next((n for n, mark in enumerate(marks) if os.path.exists(mark)), node)  # noqa: PTH110 - it raises nothing

    try:
        sequence.agree(leave_mark)
        notes = sequence.meet(note._replace(payload=sequence.attempt(look)))
        to_remove = [marks[node]] if leads else []
    finally:
        for mark in to_remove:
            with contextlib.suppress(OSError):
                mark.unlink()
    return [int(notes[nodes.index(number)].payload) for number in nodes]
