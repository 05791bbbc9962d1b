"""Prepared schedules."""

from __future__ import annotations

from syncprims.training import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
