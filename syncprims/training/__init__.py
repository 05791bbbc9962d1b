"""Parts of a hand-written PyTorch training loop, on every backend, and one object that holds them.

This package needs torch; ``import syncprims`` does not.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError("syncprims.training works on torch: pip install 'syncprims[torch]'")

from syncprims.errors import CheckpointError as CheckpointError

from .accelerate import Accelerator as Accelerator
from .accelerate import load_checkpoint_in_model as load_checkpoint_in_model
from .accumulation import Accumulator as Accumulator
from .accumulation import clip_grad_norm_ as clip_grad_norm_
from .accumulation import clip_grad_value_ as clip_grad_value_
from .accumulation import join_uneven_inputs as join_uneven_inputs
from .checkpoints import Checkpoints as Checkpoints
from .checkpoints import Loaded as Loaded
from .checkpoints import Saving as Saving
from .checkpoints import Stateful as Stateful
from .checkpoints import load_state as load_state
from .checkpoints import save_model as save_model
from .checkpoints import save_state as save_state
from .data import PreparedLoader as PreparedLoader
from .data import prepare_data_loader as prepare_data_loader
from .data import skip_first_batches as skip_first_batches
from .gathering import gather as gather
from .gathering import pad_across_processes as pad_across_processes
from .gradient_sync import average_gradients as average_gradients
from .gradient_sync import broadcast_buffers as broadcast_buffers
from .gradient_sync import broadcast_model as broadcast_model
from .optimizer import PreparedOptimizer as PreparedOptimizer
from .optimizer import PreparedScheduler as PreparedScheduler
from .precision import Precision as Precision
from .preparation import prepare as prepare
from .preparation import rank_device as rank_device
from .preparation import unwrap_model as unwrap_model
from .pytree import to_device as to_device
from .rng import set_seed as set_seed
