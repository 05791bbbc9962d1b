"""Accelerate's names over the parts of this package: for scripts written for Accelerate."""

from __future__ import annotations

from .accelerator import Accelerator as Accelerator
from .saving import load_checkpoint_in_model as load_checkpoint_in_model
