"""Examine a running job: from inside, by measuring, and from outside, by looking.

`measurements` has the facts of each rank and what all ranks measure together; `findings` has what
they mean, with cures. `observation` reads the worlds that run on this host, `processes` asks the
system about their processes, and `verdict` says who waits for whom.
"""

from __future__ import annotations

from .observation import RankReport, WorldReport, who
from .verdict import Verdict

__all__ = [
    "RankReport",
    "Verdict",
    "WorldReport",
    "who",
]
