"""The first half of the conformance suite: boards, played on directly."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

import syncprims as sp
from syncprims import errors
from syncprims._world.backends import load_backend
from syncprims._world.runtime import current
from syncprims.interface import Backend, Board, Label, Note

from .faults import Kill, sleep
from .probe import ProbedBoard
from .worlds import run_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .faults import Fault

_PATIENCE = 30.0  # seconds; nothing here should take more than one


def board() -> Board:
    """Return the board of all ranks, as the backend made it; round 1 was the start's."""
    found = current().group._rounds.board  # pyright: ignore[reportPrivateUsage]
    return found.inner if isinstance(found, ProbedBoard) else found


def note(name: str = "contract", payload: bytes = b"", failure: bytes = b"") -> Note:
    """Return some note."""
    return Note(Label("test", name, site="contract.py:1"), False, payload, failure)


def collect(where: Board) -> Sequence[Note]:
    """Return the notes of the next round, which comes."""
    deadline = where.now() + _PATIENCE
    while (notes := where.collect(0.2)) is None:
        assert where.verdict() is None, where.verdict()
        assert where.now() < deadline, "the round does not complete"
    return notes


def until(true: Callable[[], bool]) -> None:
    """Return when this holds, other ranks going on meanwhile."""
    where = board()
    deadline = where.now() + _PATIENCE
    while not true():
        assert where.now() < deadline, "it does not come true"
        sleep(0.001)


class BoardContract:
    """What every backend's boards keep."""

    backend: str  #: its name, as in SYNCPRIMS_BACKEND
    kind: Literal["threads", "processes"] = "processes"
    ranks = 3  #: of most worlds; 1 for a backend that has no others

    def run(self, program: Callable[[], Any], faults: Sequence[Fault] = ()) -> list[Any]:
        """Return what `program` returns on each rank of a world of this backend."""
        name = None if self.kind == "threads" else self.backend
        return run_world(program, self.ranks, kind=self.kind, backend=name, faults=faults)

    def needs_others(self) -> None:
        """Skip the test if there is never more than one rank."""
        if self.ranks < 2:
            import pytest

            pytest.skip("a world of one")

    # -- boards ---------------------------------------------------------------------------------

    def test_it_is_found_by_its_name(self) -> None:
        """The registry gives a backend of that name, which says what it can do."""
        cls = load_backend(self.backend)
        assert issubclass(cls, Backend)
        assert cls.name == self.backend
        assert isinstance(cls.spans_hosts, bool)
        assert isinstance(cls.detects_death, bool)

    def test_a_round_is_everybodys_notes_in_member_order(self) -> None:
        """Labels, flags, payloads and failures arrive as they were posted."""
        ranks = self.ranks

        def program() -> None:
            where, rank = board(), sp.get_rank()
            mine = Note(
                Label("kind", f"näme {rank}", rank, "op", f"file.py:{rank}"),
                rank % 2 == 0,
                b"\0" * rank,
                b"failed" if rank == 1 else b"",
            )
            where.post(mine)
            notes = collect(where)
            assert len(notes) == ranks
            for member, found in enumerate(notes):
                assert found.label == Label("kind", f"näme {member}", member, "op")
                assert found.label.site == f"file.py:{member}"
                assert found.flag == (member % 2 == 0)
                assert found.payload == b"\0" * member
                assert found.failure == (b"failed" if member == 1 else b"")

        self.run(program)

    def test_no_name_and_an_empty_one_are_two_things(self) -> None:
        """None stays None, and "" stays ""."""

        def program() -> None:
            where = board()
            for name in (None, ""):
                where.post(Note(Label("kind", name)))
                assert {found.label.name for found in collect(where)} == {name}

        self.run(program)

    def test_payloads_of_any_size_travel(self) -> None:
        """From nothing to megabytes, different on each rank."""

        def program() -> None:
            where, rank = board(), sp.get_rank()
            for size in (0, 1, 100, 5_000, 300_000, 3_000_000):
                where.post(note(payload=bytes([rank + 1]) * size))
                notes = collect(where)
                assert [found.payload for found in notes] == [
                    bytes([member + 1]) * size for member in where.members
                ]

        self.run(program)

    def test_rounds_are_counted(self) -> None:
        """`posted` and `collected` never lie."""

        def program() -> None:
            where = board()
            for number in range(2, 40):
                assert where.posted == where.collected == number - 1
                where.post(note(str(number)))
                assert (where.posted, where.collected) == (number, number - 1)
                assert {found.label.name for found in collect(where)} == {str(number)}

        self.run(program)

    def test_several_rounds_may_be_outstanding(self) -> None:
        """A note stays readable until all have collected its round."""

        def program() -> None:
            where, rank = board(), sp.get_rank()
            for base in (0, 100):
                for number in range(where.depth):
                    where.post(note(payload=b"%d %d" % (base + number, rank)))
                for number in range(where.depth):
                    assert [found.payload for found in collect(where)] == [
                        b"%d %d" % (base + number, member) for member in where.members
                    ]

        self.run(program)

    def test_an_incomplete_round_stays_uncollected(self) -> None:
        """`collect` returns None when its time is up, and is asked again."""
        self.needs_others()

        def program() -> None:
            where = board()
            if sp.get_rank() == 0:
                where.post(note())
                assert where.collect(0.0) is None
                assert where.collect(0.02) is None
                assert (where.posted, where.collected) == (2, 1)
                where.post(note())  # and so the others know
            else:
                until(lambda: where.status(0).rounds == 3)
                where.post(note())
                where.post(note())
            for number in (2, 3):
                assert len(collect(where)) == len(where.members)
                assert where.collected == number

        self.run(program)

    def test_the_status_tells_how_far_a_member_is(self) -> None:
        """Rounds, the last label and the state."""

        def program() -> None:
            where = board()
            where.post(note("second"))
            collect(where)
            for member in where.members:
                status = where.status(member)
                assert status.rounds >= 2
                assert status.state == "alive"
                assert status.label is not None
                assert status.label.kind == "test"
            where.post(note("third"))
            collect(where)

        self.run(program)

    def test_time_goes_forwards(self) -> None:
        """`now` never goes back."""

        def program() -> None:
            where = board()
            times: list[float] = []
            for _ in range(5):
                times.append(where.now())
                where.post(note())
                collect(where)
            assert times == sorted(times)

        self.run(program)

    def test_words_can_be_published(self) -> None:
        """What `publish` says is heard by all, unless the backend has no words."""

        def program() -> set[bytes]:
            backend = current()._backend  # pyright: ignore[reportPrivateUsage]
            backend.publish(b"word of %d" % sp.get_rank() + b"." * 2000)
            sp.barrier()
            heard = [backend.published(member) for member in range(sp.get_world_size())]
            sp.barrier()
            for member, word in enumerate(heard):
                assert word in (b"", b"word of %d" % member + b"." * 2000)
            return {word[:4] for word in heard}

        assert {frozenset(found) for found in self.run(program)} in (
            {frozenset([b""])},
            {frozenset([b"word"])},
        )

    def test_windows_are_shared(self) -> None:
        """Where there is a window, what one writes the others read, and objects go in notes."""

        def program() -> None:
            window = board().window()
            sizes = sp.all_gather(0 if window is None else len(window.memory))
            assert len(set(sizes)) == 1
            if window is None:
                return
            rank = sp.get_rank()
            assert board().note_limit is None, "a window is for arrays, and no object passes"
            window.memory[rank] = rank + 1
            window.fence()
            sp.barrier()
            window.fence()
            assert list(window.memory[: len(sizes)]) == [r + 1 for r in range(len(sizes))]
            sp.barrier()

        self.run(program)

    # -- aborts -----------------------------------------------------------------------------------

    def test_an_abort_breaks_the_board_for_all(self) -> None:
        """Nobody passes the round, and all hear the same verdict."""
        self.needs_others()

        def program() -> bytes | None:
            where = board()
            if sp.get_rank() == 0:
                where.abort(b"verdict of 0")
            until(lambda: where.verdict() is not None)
            where.abort(b"too late")
            where.post(note())
            assert where.collect(0.2) is None
            assert where.collected == 1
            return where.verdict()

        assert self.run(program) == [b"verdict of 0"] * self.ranks

    def test_aborts_at_once_leave_one_verdict(self) -> None:
        """The first stands, whoever was first."""
        self.needs_others()

        def program() -> bytes | None:
            where = board()
            where.abort(b"verdict of %d" % sp.get_rank())
            until(lambda: where.verdict() is not None)
            return where.verdict()

        found = self.run(program)
        assert len(set(found)) == 1
        assert found[0] in [b"verdict of %d" % rank for rank in range(self.ranks)]

    def test_rounds_before_an_abort_stay_collectable(self) -> None:
        """A verdict on the next round does not take away this one."""
        self.needs_others()

        def program() -> Any:
            where = board()
            where.post(note("whole"))
            if sp.get_rank() == 0:
                collect(where)
                where.abort(b"verdict")
            else:
                until(lambda: where.status(0).rounds >= 2)
                collect(where)
            until(lambda: where.verdict() is not None)
            return where.collected, where.verdict()

        assert self.run(program) == [(2, b"verdict")] * self.ranks

    def test_an_abort_of_a_complete_round_does_nothing(self) -> None:
        """All notes are up: everybody passes."""

        def program() -> int:
            where = board()
            where.post(note())
            until(lambda: all(where.status(member).rounds >= 2 for member in where.members))
            where.abort(b"too late")
            assert where.verdict() is None
            collect(where)
            return where.collected

        assert self.run(program) == [2] * self.ranks

    # -- ends -----------------------------------------------------------------------------------

    def test_who_finishes_is_seen_and_ends_waits(self) -> None:
        """An absent member has finished: waiting is in vain."""
        self.needs_others()

        def program() -> str:
            where = board()
            if sp.get_rank() == 1:
                return "left"
            where.post(note())
            deadline = where.now() + _PATIENCE
            while where.status(1).state != "finished":
                assert where.now() < deadline
                assert where.collect(0.2) is None
            assert where.collect(_PATIENCE) is None
            assert where.status(1).rounds == 1
            return "saw it"

        expected = ["saw it"] * self.ranks
        expected[1] = "left"
        assert self.run(program) == expected

    def test_who_fails_leaves_the_reason(self) -> None:
        """The state is failed, with what the rank left behind."""
        self.needs_others()
        saw: list[Any] = []

        def program() -> Any:
            where = board()
            if sp.get_rank() == 1:
                raise LookupError("no such shard")
            where.post(note())
            deadline = where.now() + _PATIENCE
            while where.status(1).state != "failed":
                assert where.now() < deadline
                assert where.collect(0.2) is None
            failed = errors.load(where.status(1).failure)
            assert failed.failures[1].message == "no such shard"
            assert where.collect(_PATIENCE) is None
            return "saw it"

        with contextlib.suppress(LookupError):
            saw = self.run(program)
            raise AssertionError("the failing rank's exception is lost")
        assert saw == []

    def test_who_is_killed_is_lost(self) -> None:
        """Where the backend can tell, it does, and waits end."""
        self.needs_others()
        if not load_backend(self.backend).detects_death:
            import pytest

            pytest.skip("it cannot tell a dead rank from a slow one, and says so")

        def program() -> str:
            where = board()
            if sp.get_rank() == 1:
                sp.barrier("its last")
            where.post(note())
            deadline = where.now() + _PATIENCE
            while where.status(1).state != "lost":
                assert where.now() < deadline
                assert where.collect(0.2) is None
            assert where.collect(_PATIENCE) is None
            return "saw it"

        expected: list[Any] = ["saw it"] * self.ranks
        expected[1] = None
        assert self.run(program, faults=[Kill(1, at="its last")]) == expected
