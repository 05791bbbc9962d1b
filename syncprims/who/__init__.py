"""What every rank of a running job does, seen from outside.

`observation` reads the worlds that run on this host, `processes` asks the system about their
processes, and `verdict` says who waits for whom.
"""

from __future__ import annotations

from .observation import RankReport, WorldReport, who
from .verdict import Verdict

__all__ = ["RankReport", "Verdict", "WorldReport", "who"]
