"""Parts of a training loop on top of the primitives: each works alone. Needs torch."""

from __future__ import annotations

from .checkpoints import Checkpoints as Checkpoints
from .checkpoints import Loaded as Loaded
from .checkpoints import Saving as Saving
from .checkpoints import Stateful as Stateful
from .checkpoints import load_checkpoint_in_model as load_checkpoint_in_model
from .checkpoints import load_state as load_state
from .checkpoints import save_model as save_model
from .checkpoints import save_state as save_state
