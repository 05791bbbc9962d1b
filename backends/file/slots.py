"""The processes of a run by liveness slot, for `reform`: what each calls, and the decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from syncprims.interface import Slots, State, Topology

from .board import FIRST_NAP, LONGEST_NAP
from .liveness import CALL, Liveness


class FileSlots(Slots):
    """The liveness slots of a world."""

    def __init__(
        self, liveness: Liveness, begin_epoch: Callable[[int, Topology], None], *, elastic: bool
    ) -> None:
        size = liveness.world_size
        self.members = tuple(range(size))
        self.own = liveness.slot
        self.most = size
        self.open = elastic
        self._liveness = liveness
        self.begin_epoch = begin_epoch  #: opens the boards of an epoch
        self._next = size  # the first slot that may wait to join

    def publish_call(self, call: bytes) -> None:
        """Publish the call in this rank's slot, and wake those that wait for it."""
        self._liveness.write(CALL, call)
        self._wake()

    def call_of(self, slot: int) -> bytes:
        """Return the last call of `slot`."""
        return self._liveness.read(slot, CALL)

    def state(self, slot: int) -> State:
        """Return the state of `slot`."""
        return self._liveness.state(slot)[0]

    def waiting(self) -> list[int]:
        """Return the slots whose processes wait to join."""
        if not self.open:
            return []
        liveness = self._liveness
        slots = [
            slot for slot in range(self._next, liveness.count_slots()) if slot not in self.members
        ]
        living = [slot for slot in slots if liveness.state(slot)[0] == "alive"]
        if slots and not living:
            self._next = slots[-1] + 1
        return living

    def decided(self, name: str) -> str | None:
        """Return the claim `name`."""
        return self._liveness.claims.claimed(name)

    def decide(self, name: str, word: str) -> str:
        """Claim `name`; the first claim holds."""
        decision = self._liveness.claims.claim(name, word)
        self._wake()
        return decision

    def _wake(self) -> None:
        for slot in range(self._liveness.count_slots()):
            if slot != self.own and self._liveness.peek(slot) == "alive":
                self._liveness.doorbell.wake(slot)

    def wait(
        self, ready: Callable[[], bool], timeout: float, missing: Callable[[], Sequence[int]]
    ) -> None:
        """Sleep until another process wakes this one, or one ends."""
        deadline = self.now() + timeout
        nap = FIRST_NAP
        while not ready() and (left := deadline - self.now()) > 0:
            self._liveness.doorbell.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP)

    def enter(self, epoch: int, topology: Topology) -> None:
        """Close all boards, and remove their files on the first rank."""
        self._next = max(self._next, *self.members)
        self.epoch = epoch
        self.begin_epoch(epoch, topology)

    def now(self) -> float:
        """Return the time of the boards."""
        return time.monotonic()
