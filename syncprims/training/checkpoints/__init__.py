"""Checkpoints: saved atomically, without pickle, resumed bit for bit."""

from __future__ import annotations

from .accelerate_files import is_by_accelerate as is_by_accelerate
from .accelerate_files import load_accelerate_state as load_accelerate_state
from .alone import load_state_alone as load_state_alone
from .alone import save_state_alone as save_state_alone
from .async_save import Saving as Saving
from .hooks import LoadHook as LoadHook
from .hooks import Registered as Registered
from .hooks import SaveHook as SaveHook
from .hooks import offer_models as offer_models
from .hooks import offer_weights as offer_weights
from .load_model import load_model as load_model
from .load_state import Loaded as Loaded
from .load_state import load_state as load_state
from .save_model import save_model as save_model
from .save_model import save_object as save_object
from .save_state import save_state as save_state
from .stateful import Stateful as Stateful
from .stateful import is_dtensor as is_dtensor
from .step_directory import Checkpoints as Checkpoints
from .step_directory import agreed_steps as agreed_steps
