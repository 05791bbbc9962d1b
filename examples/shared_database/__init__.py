"""Tests that share a database, which is created once."""

from __future__ import annotations
