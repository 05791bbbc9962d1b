"""Checkpoints: saved atomically, without pickle, resumed bit for bit."""

from __future__ import annotations
