"""What every rank of a running job does, seen from outside.

`observation` reads the worlds that run on this host, `processes` asks the system about their
processes, and `finding` says who waits for whom.
"""

from __future__ import annotations

from .finding import Finding
from .observation import RankReport, WorldReport, who

__all__ = ["Finding", "RankReport", "WorldReport", "who"]
