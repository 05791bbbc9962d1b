"""Large tensors are gathered in place, with the same results as small ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.training_models import everywhere

import syncprims
from syncprims.training.gathering import gather

if TYPE_CHECKING:
    from support.rank_worlds import Ranks

KINDS = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]


@everywhere
def test_tensors_of_all_sizes_and_dtypes_are_gathered(world: Ranks) -> None:
    """The first rank's is large, the others' are small, empty, or not contiguous."""

    def made(rank: int, dtype: torch.dtype) -> torch.Tensor:
        length = [70_000, 3, 0, 40_000][rank]
        rows = torch.arange(length * 2, dtype=torch.float32).reshape(2, length) + rank
        return (rows.t() % 251).to(dtype)

    def program() -> None:
        rank, ranks = syncprims.get_rank(), syncprims.get_world_size()
        joined = gather({"all": [made(rank, dtype) for dtype in KINDS]})["all"]
        for dtype, found in zip(KINDS, joined, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, torch.cat([made(r, dtype) for r in range(ranks)]))
        with pytest.raises(TypeError, match="tensors"):
            gather([1])

    world.run(program)
