"""Checkpoints: whole or not at all, without pickle, resumed bit for bit."""

from __future__ import annotations

from .loadmodel import load_model as load_model
from .loadstate import Loaded as Loaded
from .loadstate import load_state as load_state
from .objects import Stateful as Stateful
from .offering import LoadHook as LoadHook
from .offering import SaveHook as SaveHook
from .offering import offer_models as offer_models
from .offering import offer_weights as offer_weights
from .savemodel import save_model as save_model
from .saveobject import save_object as save_object
from .savestate import save_state as save_state
from .saving import Saving as Saving
from .steps import Checkpoints as Checkpoints
from .steps import Registered as Registered
from .steps import agreed_steps as agreed_steps
