"""Tests that need a CUDA device, in the script `cover.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device here")
def test_what_needs_a_device() -> None:
    script = Path(__file__).parent / "cover.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
