"""A flag that any rank raises and all see at the same step."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from syncprims._data import codec
from syncprims._protocol.rounds import PendingRound
from syncprims._protocol.validation import Seconds, require, seconds, whole_number
from syncprims._world.group import Group, internals_of
from syncprims._world.runtime import get_active_group, get_extras, get_stop_note
from syncprims.errors import signal_name
from syncprims.interface import Mark, Note

_ONE_SIGNAL = 2.0  # seconds within which signals are one


class Trigger:
    """A flag that any rank may set, and that all ranks see set at the same :meth:`check`.

    From then on it stays set, as a `threading.Event`, until :meth:`clear`.

    With ``lag=1`` a check answers for the previous one. It then waits only while another rank is
    more than one check behind, and all ranks still agree.

    :raises ValueError: if `lag` is neither 0 nor 1.
    """

    _stays = True  # set, after a true check

    def __init__(self, name: str | None = None, *, lag: int = 0) -> None:
        if lag not in (0, 1):
            raise ValueError(f"lag={lag!r}: it takes 0 (this check) or 1 (the previous check)")
        self._name = name
        self._lag = lag
        # Set or not, and why. A dict, since one operation on it is atomic, also for a signal.
        self._set: dict[str, tuple[str | None]] = {}
        # The check before: its group, its round, and why the flag was set for it.
        self._before: tuple[Group, PendingRound, tuple[str | None] | None] | None = None
        self._group: Group | None = None  # that is checked
        self._set_in: Group | None = None  # whose members all know that it is set
        self.ranks: list[int] = []  #: after a true check: which ranks had set it
        self.reason: str | None = None  #: after a true check: the lowest setter's reason
        # When launchers kill the ranks that got a signal, by time.time().
        self._deadlines: list[float] = []
        self._stop_note: str | None = None  # the file that tells our launcher of a SIGTERM
        #: After a check: whether processes wait to join the run in a :func:`syncprims.reform`.
        self.joiners: bool = False

    def set(self, reason: str | None = None) -> None:
        """Raise the flag on this rank; every rank sees it at its next check. Waits for no rank.

        Safe in a signal handler. The first reason given before a check is the one that counts.

        :raises TypeError: if the reason is not a text.
        """
        if reason is not None:
            require(reason, str, "a reason is a str")
        self._set.setdefault("reason", (reason,))

    def check(self) -> bool:
        """Return on every rank whether any rank had set the flag.

        A collective call of the current group, at the price of a barrier; it waits for at most the
        world's default timeout. After a true check, it returns True without a round until
        :meth:`clear`. With ``lag=1`` the first check is False. On a rank where it raises, the flag
        stays set.

        :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`syncprims.barrier`.
        """
        group = get_active_group()
        if self._set_in is group:
            return True
        own = internals_of(group)
        rounds = own.rounds
        before = self._before
        if self._set_in is not None and internals_of(self._set_in).rounds.closed is not None:
            self._set_in = None  # that world is over: the ranks of this one need not know
            self._set.setdefault("reason", (self.reason,))
        elif before is not None and before[0] is not group and before[2] is not None:
            self._set.setdefault("reason", before[2])  # no check has answered for it
        why = None
        try:
            note = rounds.note("trigger", self._name)
            if own.arrived is not None and own.arrived():
                note = Note(note.label, Mark.MORE)
            # In two steps: an exception of a signal handler between them finds the flag in `why`.
            why = self._set.get("reason")
            if why is not None:
                # Reset before waiting: a signal that arrives meanwhile counts for the next check.
                del self._set["reason"]
                note = Note(note.label, Mark.YES, codec.encode([why[0], self._deadlines]))
            self._group = group
            if not self._lag:
                return rounds.meet(note, own.timeout, self._read)
            # The check before may be of another group or world: then this is the first one here.
            earlier = before[1] if before is not None and before[0] is group else None

            def check() -> bool:
                pending = rounds.post_deferred(note, own.timeout)
                self._before = group, pending, why
                return earlier is not None and self._read(
                    rounds.collect_deferred(earlier, own.timeout)
                )

            return rounds.atomic_call(note.label, check)
        except BaseException:
            if why is not None:
                self._set.setdefault("reason", why)
            raise

    def _read(self, notes: Sequence[Note]) -> bool:
        """Return whether a rank had set the flag, and keep which ranks had."""
        self.joiners = False
        for lowest in notes:
            if lowest.mark is Mark.MORE:
                self.joiners = True
            elif lowest.mark:
                assert self._group is not None
                members = self._group.ranks
                self.ranks = [rank for rank, n in zip(members, notes, strict=True) if n.payload]
                said = [codec.decode(n.payload) for n in notes if n.payload]
                self.reason = said[0][0]
                self._deadlines += [at for _, deadlines in said for at in deadlines]
                # Before anything can interrupt the check: the other ranks check no more.
                self._set_in = self._group if self._stays else None
                return True
        return False

    def clear(self) -> None:
        """Lower the flag, and forget what was set before; call it on every rank, at the same step.

        It waits for no rank.
        """
        self._set_in = self._before = self.reason = None
        self.ranks = []
        self._set.clear()
        self._deadlines.clear()
        if self._stop_note is not None:  # the run goes on
            with contextlib.suppress(OSError):
                os.unlink(self._stop_note)  # noqa: PTH108 - pathlib is slow to import

    @property
    def seconds_left(self) -> float | None:
        """The time until the first rank that got a signal is killed, if `grace` says when.

        After a true check, all ranks know it. None if there was no such signal. Each rank reads its
        own clock: decide by it on one rank, or with :func:`syncprims.any_rank`.
        """
        return min(self._deadlines) - time.time() if self._deadlines else None

    def __bool__(self) -> bool:
        raise TypeError("a Trigger has no truth value: call check() on every rank")

    def set_on_signal(self, signum: int | None = None, *, grace: Seconds = None) -> None:
        """Make `signum` (by default SIGTERM) set the flag instead of ending this process.

        Further signals within 2 seconds are ignored, because a launcher and the system may each
        send it to every process of a job. A later one has the effect that it had before. So has the
        first one in a forked child, which is no rank.

        The launcher kills a process that does not end in time: torchrun 30 s after SIGTERM, SLURM
        after `KillWait` (30 s), Open MPI a second after it. `grace` says how many seconds yours
        waits, for :attr:`seconds_left`.

        :raises TypeError: if `signum` is not a number, such as `signal.SIGUSR1`.
        :raises ValueError: if there is no such signal or no program can catch it.
        :raises RuntimeError: outside the main thread, where Python handles no signals.
        """
        import signal  # slow to import
        import threading

        if signum is None:
            signum = signal.SIGTERM
        signum = whole_number(signum, "signum takes a signal, as signal.SIGUSR1")
        if signum not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            raise ValueError(
                f"signum={signum}: no program can catch such a signal; "
                f"use another one, such as signal.SIGUSR1"
            )
        wait = seconds(grace, "grace")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "set_on_signal() works in the main thread only, as Python handles signals there. "
                "Call it before this thread starts; or have the program that owns the main thread "
                "(as Ray's worker) call set() when it is about to stop"
            )
        previous: Any = signal.getsignal(signum)
        first: list[float] = []  # when the first one came

        def on_signal(received: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if first and now - first[0] >= _ONE_SIGNAL:
                restore()
                signal.raise_signal(signum)
            elif not first:
                first.append(now)
                if wait is not None:
                    self._deadlines.append(time.time() + wait)
                self.set(signal_name(received))
                if received == signal.SIGTERM:
                    self._tell_launcher()

        def restore() -> None:
            if signal.getsignal(signum) is on_signal:
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)

        def on_exit() -> None:
            # Python takes the handler away before it has ended, and a process that ends after the
            # first signal must not be killed by the second.
            if first and signal.getsignal(signum) is on_signal:
                signal.signal(signum, signal.SIG_IGN)

        signal.signal(signum, on_signal)
        atexit.register(on_exit)
        if sys.platform != "win32":
            _call_in_children(restore, signum)

    def _tell_launcher(self) -> None:
        """Leave a note for `syncprims run`, whose exit code says that the run was stopped."""
        self._stop_note = get_stop_note()
        if self._stop_note is not None:
            with contextlib.suppress(OSError), open(self._stop_note, "wb"):  # noqa: PTH123
                pass


def _call_in_children(restore: Callable[[], None], signum: int) -> None:
    """Call `restore` in each forked child; a signal that comes there before it, comes after it."""
    import signal
    import threading

    masks: dict[int, set[int]] = {}  # of the threads that fork

    def block() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, [signum])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def in_child() -> None:
        restore()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_child)


class SelfClearingTrigger(Trigger):
    """A trigger that a true check clears, as Accelerate's."""

    _stays = False


def _get_default() -> Trigger:
    trigger: Trigger = get_extras().setdefault("trigger", SelfClearingTrigger())
    return trigger


def set_trigger(reason: str | None = None) -> None:
    """Raise the world's own trigger; every rank sees it at its next check.

    Waits for no rank, and does not start the world. Otherwise as :meth:`Trigger.set`.

    :raises TypeError: if the reason is not a text.
    :raises WorldClosed: after :func:`shutdown`.
    """
    _get_default().set(reason)


def check_trigger() -> bool:
    """Return on every rank whether any rank has raised the world's own trigger, and reset it.

    :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: as :func:`barrier`.
    """
    return _get_default().check()
