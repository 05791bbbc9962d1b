"""Checkpoints: whole or not at all, without pickle, resumed bit for bit."""

from __future__ import annotations

from .loadmodel import load_checkpoint_in_model as load_checkpoint_in_model
from .savemodel import save_model as save_model
