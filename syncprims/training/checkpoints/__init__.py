"""Checkpoints: saved atomically, without pickle, resumed bit for bit."""

from __future__ import annotations

from .async_save import Saving as Saving
from .load_model import load_checkpoint_in_model as load_checkpoint_in_model
from .save_model import save_model as save_model
from .save_model import save_object as save_object
from .stateful import Stateful as Stateful
from .stateful import is_dtensor as is_dtensor
from .states import Checkpoints as Checkpoints
from .states import Loaded as Loaded
from .states import agreed_steps as agreed_steps
from .states import load_state as load_state
from .states import save_state as save_state
