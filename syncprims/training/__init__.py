"""Parts of a training loop on top of the primitives: each works alone. Needs torch."""

from __future__ import annotations

from .checkpoints import load_checkpoint_in_model as load_checkpoint_in_model
from .checkpoints import save_model as save_model
