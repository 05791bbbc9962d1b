"""The conformance suite for backends: what :mod:`syncprims.interface` requires, as tests.

    class TestMine(BackendContract):
        backend = "mine"

Pytest runs every method as a test: first boards alone, then the library on top of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import syncprims as sp
from syncprims import errors
from syncprims._world.registry import load_backend
from syncprims._world.runtime import get_world
from syncprims.interface import MARKS, Awaited, Board, Label, Note, Status

from .faults import Fault, Kill, sleep
from .probe import unprobe
from .worlds import run_world

_TIME_LIMIT = 20.0  # seconds; nothing here should take more than one


def _board() -> Board:
    """Return the board of all ranks, as the backend made it; round 1 was the start's.

    The world no longer records this rank's calls.
    """
    return unprobe(get_world().rounds.board)


def _note(name: str = "contract", payload: bytes = b"") -> Note:
    return Note(Label("test", name, site="contract.py:1"), payload=payload)


def _collect(board: Board) -> Sequence[Note]:
    """Return the notes of the next round, which completes."""
    deadline = board.now() + _TIME_LIMIT / 3
    while (notes := board.collect(0.2)) is None:
        assert board.verdict() is None, board.verdict()
        assert board.now() < deadline, "the round does not complete"
    return notes


def _wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition is true; other ranks run meanwhile."""
    board = _board()
    deadline = board.now() + _TIME_LIMIT
    while not condition():
        assert board.now() < deadline, "the condition does not become true"
        sleep(0.001)


def _wait_in_vain(board: Board, rank: int, state: str) -> Status:
    """Return the status of `rank` once it has ended as `state` says, which ends waits."""
    deadline = board.now() + _TIME_LIMIT
    while board.status(rank).state != state:
        assert board.now() < deadline
        assert board.collect(0.2) is None
    begin = board.now()
    assert board.collect(_TIME_LIMIT / 2) is None
    assert board.now() - begin < _TIME_LIMIT / 4, "collect() waits for a rank that has ended"
    return board.status(rank)


def _on_every_rank(body: Callable[[Any, Board, int], None]) -> Callable[[Any], None]:
    """Return a test that runs ``body(self, board, rank)`` on every rank of a world."""

    def test(self: BackendContract) -> None:
        __tracebackhide__ = True
        self.run(lambda: body(self, _board(), sp.get_rank()))

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


class BackendContract:
    """The tests that every backend has to pass. Derive a class from it, and name the backend."""

    backend: str  #: its name, as in SYNCPRIMS_BACKEND
    kind: Literal["threads", "processes"] = "processes"
    ranks = 3  #: of most worlds; 1 for a backend that has no others

    def run(self, program: Callable[[], Any], faults: Sequence[Fault] = ()) -> list[Any]:
        """Return what `program` returns on each rank of a world of this backend."""
        return run_world(program, self.ranks, kind=self.kind, backend=self.backend, faults=faults)

    def needs_others(self) -> None:
        """Skip the test if there is never more than one rank."""
        if self.ranks < 2:
            import pytest

            pytest.skip("a world of one")

    # -- boards ---------------------------------------------------------------------------------

    @_on_every_rank
    def test_round_has_the_notes_of_all_in_member_order(self, board: Board, rank: int) -> None:
        """Labels, marks, payloads and failures arrive as they were posted."""
        mine = Note(
            Label("kind", f"näme {rank}", rank, "op", f"file.py:{rank}", b"\0=%d" % rank),
            MARKS[rank % 4],
            b"\0" * rank,
            b"failed" if rank == 1 else b"",
        )
        board.post(mine)
        notes = _collect(board)
        assert len(notes) == self.ranks
        for member, found in enumerate(notes):
            assert found.label == Label("kind", f"näme {member}", member, "op")
            assert found.label.site == f"file.py:{member}"
            assert found.label.data == b"\0=%d" % member
            assert found.mark == member % 4
            assert found.payload == b"\0" * member
            assert found.failure == (b"failed" if member == 1 else b"")
        for name in (None, ""):  # they differ
            board.post(Note(Label("kind", name)))
            assert {found.label.name for found in _collect(board)} == {name}

    @_on_every_rank
    def test_payloads_of_any_size_arrive(self, board: Board, rank: int) -> None:
        """From nothing to megabytes, different on each rank."""
        for size in (0, 1, 100, 5_000, 300_000, 3_000_000):
            board.post(_note(payload=bytes([rank + 1]) * size))
            assert [found.payload for found in _collect(board)] == [
                bytes([member + 1]) * size for member in board.members
            ]

    @_on_every_rank
    def test_rounds_are_counted(self, board: Board, rank: int) -> None:
        """Counts and statuses are exact after every call, and time never goes back."""
        time = 0.0
        for number in range(2, 40):
            assert board.posted == board.collected == number - 1
            board.post(_note(str(number)))
            assert (board.posted, board.collected) == (number, number - 1)
            assert {found.label.name for found in _collect(board)} == {str(number)}
            for member in board.members:
                status = board.status(member)
                assert status.rounds in (number, number + 1)
                assert status.state == "alive"
                assert status.label is not None
                assert status.label.kind == "test"
            time, before = board.now(), time
            assert before <= time
        board.post(_note())  # so all are alive until here
        _collect(board)

    @_on_every_rank
    def test_several_rounds_may_be_outstanding(self, board: Board, rank: int) -> None:
        """A note stays readable until all have collected its round."""
        for base in (0, 100):
            for number in range(board.depth):
                board.post(_note(payload=b"%d %d" % (base + number, rank)))
            for number in range(board.depth):
                assert [found.payload for found in _collect(board)] == [
                    b"%d %d" % (base + number, member) for member in board.members
                ]

    @_on_every_rank
    def test_boards_of_other_names_have_rounds_of_their_own(self, board: Board, rank: int) -> None:
        """A group may meet at several boards; what is posted to one is not seen at another."""
        world = get_world()
        names = ("a", "b", "A/b: \u00e9")
        named = [world.open_rounds(board.members, name).board for name in names]
        assert [one.name for one in named] == ["a", "b", "A/b: \u00e9"]
        for one in named:
            one.post(_note(f"at {one.name}"))
        for one in reversed(named):
            assert {found.label.name for found in _collect(one)} == {f"at {one.name}"}
            assert (one.posted, one.collected) == (1, 1)
        assert (board.posted, board.collected) == (1, 1)

    @_on_every_rank
    def test_a_rank_can_wait_for_the_first_of_several_notes(self, board: Board, rank: int) -> None:
        """A wait beside the rounds ends when a note is there, or when the time is up."""
        self.needs_others()
        world = get_world()
        pairs = {
            other: world.open_rounds((0, other), "pair")
            for other in range(1, self.ranks)
            if rank in (0, other)
        }

        def senders() -> list[int]:
            boards = {other: rounds.board for other, rounds in pairs.items()}
            return [r for r, one in boards.items() if one.status(r).rounds > one.posted]

        if rank:
            sp.barrier()
            pairs[rank].meet(_note())
            return
        boards = [rounds.board for rounds in pairs.values()]
        now = boards[0].now

        def come(seconds: float) -> bool:
            awaited = Awaited("a wait for any rank", boards)
            return world.background.wait(lambda: bool(senders()), now() + seconds, awaited)

        assert not come(0.01)
        sp.barrier()
        for _ in pairs:
            assert come(_TIME_LIMIT)
            pairs[senders()[0]].meet(_note())

    @_on_every_rank
    def test_incomplete_round_stays_uncollected(self, board: Board, rank: int) -> None:
        """`collect` returns None after its timeout, and can be called again."""
        self.needs_others()
        if rank == 0:
            board.post(_note())
            assert board.collect(0.0) is None
            assert board.collect(0.02) is None
            assert (board.posted, board.collected) == (2, 1)
            board.post(_note())  # the others wait for this one
        else:
            _wait_until(lambda: board.status(0).rounds == 3)
            board.post(_note())
            board.post(_note())
        for number in (2, 3):
            assert len(_collect(board)) == len(board.members)
            assert board.collected == number

    @_on_every_rank
    def test_what_is_published_can_be_read(self, board: Board, rank: int) -> None:
        """All ranks read what a process publishes, unless the backend does not support it."""
        backend = get_world().backend
        wanted = [b"waits of %d" % member + b"." * 2000 for member in range(self.ranks)]
        backend.publish("waits", wanted[rank])
        sp.barrier()
        found = [backend.published("waits", process) for process in backend.members]
        assert found in (wanted, [b""] * self.ranks)
        assert len(set(sp.all_gather(found == wanted))) == 1
        if backend.can_reform:
            assert [backend.state(process) for process in backend.members] == ["alive"] * self.ranks
            sp.barrier()

    @_on_every_rank
    def test_the_first_decision_holds(self, board: Board, rank: int) -> None:
        """Whoever else decides, all ranks have one decision, and a wait for it ends."""
        backend, now = get_world().backend, board.now
        assert not backend.wait(lambda: bool(backend.decide("contract")), now() + 0.01)
        sp.barrier()
        if rank == self.ranks - 1:
            backend.decide("contract", f"of-{rank}")
        assert backend.wait(lambda: bool(backend.decide("contract")), now() + _TIME_LIMIT)
        assert backend.decide("contract", "too-late") == f"of-{self.ranks - 1}"
        mine = backend.decide("race", f"of-{rank}")
        decisions = sp.all_gather(mine)
        assert set(decisions) == {backend.decide("race")}
        assert mine in [f"of-{other}" for other in range(self.ranks)]

    @_on_every_rank
    def test_windows_are_shared(self, board: Board, rank: int) -> None:
        """All have the same windows, if any, and read what one writes."""
        members, small, large = self.ranks, board.small_window, board.window()
        assert large is None or board.note_limit is None, "a window is for arrays, not for objects"
        if small is not None:  # a cache line of each member, in each of two rounds
            assert len(small.memory) % (2 * members) == 0
            assert len(small.memory) >= 2 * members * 64
        for window in (small, large):
            (size,) = set(sp.all_gather(0 if window is None else len(window.memory)))
            if window is None:
                continue
            ends = [(member + 1) * (size // members) - 1 for member in range(members)]
            window.memory[ends[rank]] = rank + 1
            window.fence()
            sp.barrier()
            window.fence()
            assert [window.memory[end] for end in ends] == [r + 1 for r in range(members)]
            sp.barrier()

    # -- aborts -----------------------------------------------------------------------------------

    def test_aborts_break_the_board_with_one_verdict(self) -> None:
        """No rank passes the round, and all get the same verdict, also if several abort."""
        self.needs_others()

        def program() -> bytes | None:
            board, rank = _board(), sp.get_rank()
            if rank != 1:
                board.abort(b"verdict of %d" % rank)
            _wait_until(lambda: board.verdict() is not None)
            board.abort(b"too late")
            board.post(_note())
            assert board.collect(0.2) is None
            assert board.collected == 1
            return board.verdict()

        (verdict,) = set(self.run(program))
        assert verdict in [b"verdict of %d" % rank for rank in range(self.ranks)]

    @_on_every_rank
    def test_rounds_before_an_abort_stay_collectable(self, board: Board, rank: int) -> None:
        """A verdict on the next round does not affect this one."""
        self.needs_others()
        board.post(_note("whole"))
        if rank == 0:
            _collect(board)
            board.abort(b"verdict")
        else:
            _wait_until(lambda: board.status(0).rounds >= 2)
            _collect(board)
        _wait_until(lambda: board.verdict() is not None)
        assert (board.collected, board.verdict()) == (2, b"verdict")

    @_on_every_rank
    def test_abort_of_a_complete_round_does_nothing(self, board: Board, rank: int) -> None:
        """All notes are posted: every rank passes."""
        board.post(_note())
        _wait_until(lambda: all(board.status(member).rounds >= 2 for member in board.members))
        board.abort(b"too late")
        assert board.verdict() is None
        _collect(board)
        assert board.collected == 2

    # -- ends -----------------------------------------------------------------------------------

    @_on_every_rank
    def test_finished_member_is_seen_and_ends_waits(self, board: Board, rank: int) -> None:
        """A wait for a member that has finished ends: its note will never come."""
        self.needs_others()
        if rank != 1:
            board.post(_note())
            assert _wait_in_vain(board, 1, "finished").rounds == 1

    def test_failed_member_leaves_its_failure(self) -> None:
        """The state is failed, and the status contains what the rank raised."""
        self.needs_others()

        def program() -> None:
            board = _board()
            if sp.get_rank() == 1:
                raise LookupError("no such shard")
            board.post(_note())
            failed = errors.load(_wait_in_vain(board, 1, "failed").failure)
            assert failed.failures[1].message == "no such shard"

        with contextlib.suppress(LookupError):
            self.run(program)
            raise AssertionError("the failing rank's exception is lost")

    def test_killed_member_is_lost(self) -> None:
        """If the backend detects death, the state is lost, and waits end."""
        self.needs_others()
        if not load_backend(self.backend).detects_death:
            import pytest

            pytest.skip("it does not distinguish a dead rank from a slow one, and says so")

        def program() -> str:
            if sp.get_rank() == 1:
                sp.barrier("its last")
            board = _board()
            board.post(_note())
            return _wait_in_vain(board, 1, "lost").state

        found = self.run(program, faults=[Kill(1, at="its last")])
        assert found == ["lost", None, *["lost"] * (self.ranks - 2)]

    # -- the library on top of the boards -------------------------------------------------------

    @_on_every_rank
    def test_objects_and_arrays_of_any_size_arrive(self, board: Board, rank: int) -> None:
        """The library moves them over this backend, and arrays are the same to the bit."""
        ranks = self.ranks
        for src in range(ranks):
            assert sp.broadcast({"from": rank}, src=src) == {"from": src}
        assert sp.all_gather((rank, "x" * rank)) == [(r, "x" * r) for r in range(ranks)]
        assert sp.all_reduce({"a": [rank]}, "max") == {"a": [ranks - 1]}
        assert sp.any_rank(rank == 0)
        import numpy

        for size in (0, 1, 1_000, 400_000):
            mine = numpy.arange(size, dtype=numpy.float64) + rank
            assert (sp.broadcast(mine, src=ranks - 1) == mine - rank + ranks - 1).all()
            total = sp.all_reduce(mine)
            sp.assert_same(total, "total")  # to the bit
            assert (total == ranks * (mine - rank) + sum(range(ranks))).all()
