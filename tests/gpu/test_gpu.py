"""Tests that need a CUDA device, in the script `cover.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_environment import run_python

DEVICES = torch.cuda.device_count()


@pytest.mark.skipif(DEVICES == 0, reason="no CUDA device here")
@pytest.mark.parametrize("ranks", sorted({1, max(2, DEVICES)}))
def test_what_needs_a_device(ranks: int) -> None:
    """Two ranks share one device, through the memory of the host; NCCL joins more, or one rank."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = run_python(*start, Path(__file__).with_name("cover.py"))
    assert done.returncode == 0, done.stdout + done.stderr
