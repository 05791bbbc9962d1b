"""The environment of processes that a test starts as ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncprims._world.launchers import list_rank_variables

if TYPE_CHECKING:
    from pathlib import Path


def clean_environment(directory: Path, **more: str) -> dict[str, str]:
    """Return this process's variables without those of a launcher, for ranks that meet there."""
    outer = list_rank_variables() | {"MASTER_ADDR", "MASTER_PORT"}
    clean = {k: v for k, v in os.environ.items() if k not in outer and "SYNCPRIMS" not in k}
    return {**clean, "SYNCPRIMS_DIR": str(directory), "OMP_NUM_THREADS": "1", **more}
