"""Tests that share a database which is made once."""

from __future__ import annotations
