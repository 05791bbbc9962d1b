"""Checkpoints: saved atomically, without pickle, resumed bit for bit."""

from __future__ import annotations

from .async_save import Saving as Saving
from .load_model import load_checkpoint_in_model as load_checkpoint_in_model
from .load_state import Loaded as Loaded
from .load_state import load_state as load_state
from .save_model import save_model as save_model
from .save_model import save_object as save_object
from .save_state import save_state as save_state
from .stateful import Stateful as Stateful
from .stateful import is_dtensor as is_dtensor
from .step_directory import Checkpoints as Checkpoints
from .step_directory import agreed_steps as agreed_steps
