"""Words that ranks leave for the leading one in the checkpoint's own directory.

A save behind the training cannot meet the others: they are training. So each rank leaves a file
that says what its part came to, and the leading one looks for them until all are there.

A file of its own, without content, says that it listens. When it gives up that goes first, and
then all that the save has made; when it has heard everybody, that goes last. So a rank that is
late, and finds nobody listening and its own word still there, knows that the save is not to be.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from syncprims import CheckpointError

from . import disk, manifest
from .seal import check, parse, sealed
from .weightfiles import remove_or_report, temporary

if TYPE_CHECKING:
    from .job import Job

_LEADING = 0  # place in a team
_LONGEST = 64 << 20  # bytes
_GRACE = 60.0  # seconds that a program that has ended lets the other ranks have
_LEFTOVER = re.compile(
    rf"\.{re.escape(manifest.NAME)}(?:\.told-\d+(?:-part)?)?\.tmp-[0-9a-f]{{16}}"
)


def is_leftover(name: str) -> bool:
    """Tell whether a file in a checkpoint's directory is one that a killed save has left."""
    return _LEFTOVER.fullmatch(name) is not None


def _path(job: Job, place: int, ending: str = "") -> str:
    folder, token = job.place.folder, job.place.token
    return f"{folder}/{temporary(f'{manifest.NAME}.told-{place}{ending}', token)}"


def listen(job: Job) -> None:
    """Let the other ranks know that the leading one, which calls this, waits for their words."""
    disk.write_small(_path(job, _LEADING), b"")


def stop_listening(job: Job) -> None:
    """Let ranks that are late know that nobody waits for them."""
    remove_or_report(_path(job, _LEADING))


def is_heard(job: Job) -> bool:
    """Tell whether the leading rank waits for words."""
    return disk.exists(_path(job, _LEADING))


def leave(job: Job, said: dict[str, Any]) -> None:
    """Let the leading rank know what this rank's part came to, or find that it has given up.

    Then nothing is left of the save, and it is for the leading rank to say why.
    """
    part, word = _path(job, job.team.place, "-part"), _path(job, job.team.place)
    try:
        disk.write_small(part, sealed(said)[0])
        disk.rename(part, word)
    except Exception:
        remove_or_report(part)
        if is_heard(job):
            raise
        return  # the directory has gone under this rank
    with contextlib.suppress(OSError):  # it has been said: no error of this rank's
        # By a removal, which only one can make: what a network file system shows may be gone.
        if not is_heard(job) and disk.remove(word):
            job.abandon()


def collect(job: Job, own: dict[str, Any], given_up: threading.Event) -> list[dict[str, Any]]:
    """Return what every rank's part came to, once all have said it, and remove the files.

    :raises CheckpointError: if that is given up, or this program has ended long ago.
    """
    said = {job.team.place: own}
    pause, ended = 0.005, 0.0
    while len(said) < len(job.team.ranks):
        for place in range(len(job.team.ranks)):
            path = _path(job, place)
            if place not in said and disk.exists(path):
                data = disk.read_small(path, _LONGEST)
                document = parse(path, data)
                check(path, data)
                said[place] = document
        if len(said) == len(job.team.ranks):
            break
        if given_up.wait(pause):
            raise CheckpointError(f"{job.doing}: given up, since a rank's part has failed")
        if not is_heard(job):
            raise CheckpointError(
                f"{job.doing}: another save, or a person, has removed {job.place.folder} or files "
                f"in it while ranks still wrote there"
            )
        pause = min(2 * pause, 0.1)
        if threading.main_thread().is_alive():
            continue
        ended = ended or time.monotonic()
        if time.monotonic() - ended > _GRACE:
            late = [rank for i, rank in enumerate(job.team.ranks) if i not in said]
            raise CheckpointError(f"{job.doing}: ranks {late} have not finished their part")
    for place in sorted(said, reverse=True):  # the leading rank's last
        disk.remove(_path(job, place))
    return [said[place] for place in sorted(said)]
