"""``assert_dealt``: each sample of an epoch is dealt to one rank, once."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import both_kinds

import syncprims as sp
from syncprims.testing import assert_dealt, run_world

RANKS = 3


def dealt(shares: list[list[Any]], of: Any, **options: Any) -> str:
    """Return what ranks that see these shares raise, all the same; "" if they raise nothing."""

    def program() -> str:
        try:
            assert_dealt(shares[sp.get_rank()], of, **options)
        except sp.RankMismatch as error:
            sp.barrier("all raise, and stay in step")
            return str(error)
        return ""

    (said,) = set(run_world(program, len(shares)))
    return str(said)


def test_each_sample_once_is_right() -> None:
    assert dealt([[0, 3], [1, 4], [2]], 5) == ""
    assert dealt([[[0, 1]], [[2], [3]], []], 4) == ""  # batches; a rank without any
    assert dealt([["a"], [("b", "c")]], "abc") == ""


def test_missing_doubled_and_unknown_samples_are_named_by_rank() -> None:
    said = dealt([[0, 1, 2, 9], [0, 3, 3, 5], [6, 7, 5, 8]], 9)
    assert "each of 9 samples once:\n  missing: 4\n" in said
    assert "  doubled: 0 (ranks 0, 1), 3 (ranks 1, 1), 5 (ranks 1, 2)\n" in said
    assert "  unknown: 9 (rank 0)\n" in said
    assert "padding:" not in said


def test_all_ranks_that_see_all_is_no_padding() -> None:
    said = dealt([[0, 1, 2, 3]] * 2, 4)
    assert "  doubled: 0 (ranks 0, 1), 1 (ranks 0, 1)" in said
    assert dealt([[[0, 1], [2, 3]]] * 2, 4, padding=True)


def test_padding_is_named_or_accepted() -> None:
    shares = [[0, 3], [1, 4], [2, 0]]
    assert "\n  padding: 0 (ranks 0, 2)\n" in dealt(shares, 5)
    assert dealt(shares, 5, padding=True) == ""
    batches = [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert "\n  padding: 0 (ranks 0, 0), 1 (ranks 0, 1), 2 (ranks 1, 1)\n" in dealt(batches, 5)
    assert dealt(batches, 5, padding=True) == ""


@both_kinds
def test_a_loader_and_a_key(kind: Any) -> None:
    torch = pytest.importorskip("torch")
    from syncprims.training import prepare_data_loader

    def program() -> None:
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True)
        assert_dealt(prepare_data_loader(loader, seed=1), 8)
        assert_dealt(prepare_data_loader(loader, seed=1), 8, key=lambda batch: batch)
        with pytest.raises(sp.RankMismatch, match="doubled"):
            assert_dealt(torch.utils.data.DataLoader(range(8), batch_size=2), 8)

    run_world(program, 2, kind=kind, torch=True)
