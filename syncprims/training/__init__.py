"""Parts of a hand-written PyTorch training loop, on every backend.

This package needs torch; ``import syncprims`` does not.
"""

from __future__ import annotations

from importlib.util import find_spec

from syncprims.errors import CheckpointError
from syncprims.errors import install as _install

if find_spec("torch") is None:
    raise ImportError(f"syncprims.training needs torch: {_install('torch')}")


from .accumulation import Accumulator
from .checkpoints.async_save import Saving
from .checkpoints.load_model import load_checkpoint_in_model
from .checkpoints.save_model import save_model
from .checkpoints.stateful import Stateful
from .checkpoints.states import Checkpoints, Loaded, load_state, save_state
from .data.loader import PreparedLoader, prepare_data_loader, skip_first_batches
from .gathering import gather, pad_across_processes
from .gradient_sync import average_gradients, broadcast_buffers, broadcast_model
from .optimizer import PreparedOptimizer, PreparedScheduler
from .precision import Precision
from .preparation import prepare, rank_device, unwrap_model
from .pytree import to_device
from .rng import set_seed
from .uneven_inputs import join_uneven_inputs

__all__ = [  # noqa: RUF022 - by the modules they come from
    "Accumulator", "CheckpointError", "Checkpoints", "Loaded", "Saving", "Stateful",
    "load_checkpoint_in_model", "load_state", "save_model", "save_state",
    "PreparedLoader", "prepare_data_loader", "skip_first_batches", "gather", "pad_across_processes",
    "average_gradients", "broadcast_buffers", "broadcast_model",
    "PreparedOptimizer", "PreparedScheduler", "Precision", "prepare", "rank_device", "unwrap_model",
    "to_device", "set_seed", "join_uneven_inputs",
]  # fmt: skip
