"""Several threads of one rank in its waits at once, also without the global lock of Python."""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

# Transfers of a real rank that come and go as often would take minutes.
from syncprims._protocol.background import Background, Task


class _Still:
    """A task without a step to take."""

    def can_move(self) -> bool:
        return False

    def move(self) -> bool:
        return False


def test_a_wait_goes_on_while_another_thread_begins_and_ends_transfers() -> None:
    background = Background(cast("Any", None))
    tasks: list[Task] = [_Still() for _ in range(50)]
    ended = threading.Event()

    def begin_and_end() -> None:
        while not ended.is_set():
            for task in tasks:
                background.add(task)
            for task in tasks:
                background.drop(task)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=begin_and_end)
    thread.start()
    try:
        moved = [background.move() for _ in range(5000)]
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not any(moved)
