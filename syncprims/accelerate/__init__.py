"""Accelerate's names with Accelerate's defaults: a script moves here by its import lines alone.

Write ``syncprims.accelerate`` in place of ``accelerate`` in them, and the script is ported. A name
without an equivalent raises an ImportError that says what to do instead. This package needs torch;
``import syncprims`` does not.
"""

from __future__ import annotations

from typing import Any

from syncprims.training import load_checkpoint_in_model as load_checkpoint_in_model

from .accelerator import Accelerator as Accelerator
from .big_modeling import init_empty_weights as init_empty_weights
from .big_modeling import init_on_device as init_on_device
from .data_loader import skip_first_batches as skip_first_batches
from .launchers import debug_launcher as debug_launcher
from .launchers import notebook_launcher as notebook_launcher
from .local_sgd import LocalSGD as LocalSGD
from .state import PartialState as PartialState
from .utils import AutocastKwargs as AutocastKwargs
from .utils import DataLoaderConfiguration as DataLoaderConfiguration
from .utils import DDPCommunicationHookType as DDPCommunicationHookType
from .utils import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from .utils import DistributedType as DistributedType
from .utils import GradScalerKwargs as GradScalerKwargs
from .utils import InitProcessGroupKwargs as InitProcessGroupKwargs
from .utils import ProfileKwargs as ProfileKwargs
from .utils import find_executable_batch_size as find_executable_batch_size
from .utils import not_offered as _not_offered
from .utils import synchronize_rng_states as synchronize_rng_states

#: The version of Accelerate whose names these are: scripts compare it with what they need.
__version__ = "1.15.0"


def __getattr__(name: str) -> Any:
    raise _not_offered(__name__, name)
