"""The checks of `checks.py`: on the device where there is one, else on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rank_environment import run_python


def run_checks(device: str) -> None:
    done = run_python(Path(__file__).with_name("rig.py"), "--device", device, "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_the_checks_of_a_device_pass_on_the_cpu() -> None:
    """On a GPU only the device differs: `make gpu`."""
    run_checks("cpu")
