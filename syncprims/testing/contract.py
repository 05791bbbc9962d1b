"""The conformance suite for backends: what :mod:`syncprims.interface` asks for, tried out.

    class TestMine(BackendContract):
        backend = "mine"

Pytest runs every method as a test: first boards alone, then what the library makes of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import syncprims as sp

from .board_contract import BoardContract, board, until


class BackendContract(BoardContract):
    """What every backend keeps. Derive, and name the backend."""

    def test_every_primitive_works(self) -> None:
        """All collectives, with the values they promise."""
        ranks = self.ranks

        def program() -> None:
            rank = sp.get_rank()
            assert sp.get_world_size() == ranks
            for src in range(ranks):
                assert sp.broadcast({"from": rank}, src=src) == {"from": src}
            assert sp.all_gather((rank, "x" * rank)) == [(r, "x" * r) for r in range(ranks)]
            assert sp.all_reduce(rank + 1) == ranks * (ranks + 1) // 2
            assert sp.all_reduce({"a": [rank]}, "max") == {"a": [ranks - 1]}
            assert sp.any_rank(rank == 0)
            assert sp.all_ranks(rank == 0) is (ranks == 1)
            sp.assert_same("alike", "word")
            with sp.main_first():
                pass
            with sp.in_turn():
                pass
            assert sp.on_main(share=True)(lambda: "main's")() == "main's"

        self.run(program)

    def test_arrays_are_the_same_bits_everywhere(self) -> None:
        """Broadcast and all-reduce of arrays of all sizes."""
        ranks = self.ranks

        def program() -> None:
            import numpy

            rank = sp.get_rank()
            for size in (0, 1, 1_000, 400_000):
                mine = numpy.arange(size, dtype=numpy.float64) + rank
                got = sp.broadcast(mine, src=ranks - 1)
                assert (got == numpy.arange(size) + ranks - 1).all()
                total = sp.all_reduce(mine)
                sp.assert_same(total, "total")
                assert (total == ranks * numpy.arange(size) + sum(range(ranks))).all()

        self.run(program)

    def test_nobody_leaves_a_barrier_before_all_have_entered(self) -> None:
        """Seen over many rounds, by what each has said before."""

        def program() -> None:
            for number in range(100):
                assert set(sp.all_gather(number)) == {number}
                sp.barrier()

        self.run(program)

    def test_groups_do_not_disturb_each_other(self) -> None:
        """Rounds of a part of the ranks, between those of all."""
        self.needs_others()
        ranks = self.ranks

        def program() -> None:
            few = sp.group([0, 1])
            for number in range(20):
                if sp.get_rank() < 2:
                    assert few.all_gather((number, sp.get_rank())) == [(number, 0), (number, 1)]
                assert sp.all_reduce(1) == ranks

        self.run(program)

    def test_a_lagging_trigger_fires_everywhere_at_once(self) -> None:
        """Deferred rounds are answered alike."""

        def program() -> list[bool]:
            trigger = sp.Trigger(lag=1)
            found: list[bool] = []
            for step in range(30):
                if step == 20 and sp.get_rank() == sp.get_world_size() - 1:
                    trigger.set("now")
                found.append(trigger.check())
            return found

        assert self.run(program) == [[step == 21 for step in range(30)]] * self.ranks

    def test_different_calls_are_a_mismatch_on_all_ranks(self) -> None:
        """With a line for each rank, the same everywhere."""
        self.needs_others()

        def program() -> str:
            try:
                sp.barrier("a" if sp.get_rank() else "b")
            except sp.CollectiveMismatch as error:
                return str(error)
            return "passed"

        (said,) = set(self.run(program))
        assert "rank 0: barrier 'b'" in said
        assert "rank 1: barrier 'a'" in said

    def test_a_timeout_names_who_is_missing(self) -> None:
        """And the board stays broken, also for who comes late."""
        self.needs_others()

        def program() -> Any:
            if sp.get_rank() == 1:
                until(lambda: board().verdict() is not None)
            try:
                sp.barrier("late", timeout=0.3)
            except sp.SyncTimeout as error:
                return error.missing
            return "passed"

        assert self.run(program) == [[1]] * self.ranks

    def test_a_shared_failure_leaves_all_in_step(self) -> None:
        """What fails in `main_first` fails on all, and they go on."""

        def program() -> int:
            with contextlib.suppress(OSError, sp.PeerFailed), sp.main_first():
                raise OSError("no room")
            return sp.all_reduce(1)

        assert self.run(program) == [self.ranks] * self.ranks

    def test_worlds_come_one_after_another(self) -> None:
        """Nothing of one is seen by the next."""

        def program() -> list[int]:
            return sp.all_gather(sp.get_rank())

        for _ in range(3):
            assert self.run(program) == [list(range(self.ranks))] * self.ranks
