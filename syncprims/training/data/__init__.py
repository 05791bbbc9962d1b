"""Data loaders: batches dealt to ranks, in an order that can be resumed."""

from __future__ import annotations
