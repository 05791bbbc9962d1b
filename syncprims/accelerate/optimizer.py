"""Prepared optimizers."""

from __future__ import annotations

from syncprims.training import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
