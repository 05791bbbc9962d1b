"""What a hand-written PyTorch loop needs, on every backend: parts that work alone, and one face.

Needs torch; ``import syncprims`` does not.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError("syncprims.training works on torch: pip install 'syncprims[torch]'")

from syncprims.errors import CheckpointError as CheckpointError

from ._saving import load_checkpoint_in_model as load_checkpoint_in_model
from .accelerator import Accelerator as Accelerator
from .accumulation import Accumulator as Accumulator
from .averaging import average_gradients as average_gradients
from .averaging import share_buffers as share_buffers
from .averaging import share_model as share_model
from .checkpoints import Checkpoints as Checkpoints
from .checkpoints import Loaded as Loaded
from .checkpoints import Saving as Saving
from .checkpoints import Stateful as Stateful
from .checkpoints import load_state as load_state
from .checkpoints import save_model as save_model
from .checkpoints import save_state as save_state
from .clipping import clip_grad_norm_ as clip_grad_norm_
from .clipping import clip_grad_value_ as clip_grad_value_
from .data import PreparedLoader as PreparedLoader
from .data import prepare_data_loader as prepare_data_loader
from .data import skip_first_batches as skip_first_batches
from .devices import rank_device as rank_device
from .devices import to_device as to_device
from .gathering import gather as gather
from .gathering import pad_across_processes as pad_across_processes
from .joining import join_uneven_inputs as join_uneven_inputs
from .optimizer import PreparedOptimizer as PreparedOptimizer
from .precision import Precision as Precision
from .preparation import prepare as prepare
from .preparation import unwrap_model as unwrap_model
from .schedule import PreparedScheduler as PreparedScheduler
from .seeding import set_seed as set_seed
