"""Accelerate's names, defaults and habits: a script moves here by its import lines alone.

Write ``syncprims.accelerate`` in place of ``accelerate`` in them, and the script is ported. A name
without an equivalent raises an ImportError that says what to do instead. What differs, because
Accelerate is wrong there, is in one table: ``docs/how-to/from-accelerate.md``. This package needs
torch; ``import syncprims`` does not.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

# Without torch, its error says what to install.
import syncprims.training  # noqa: F401 # pyright: ignore[reportUnusedImport]

from . import accelerator, utils
from . import data_loader as data_loader
from . import logging as logging
from . import state as state
from . import tracking as tracking
from .accelerator import Accelerator as Accelerator
from .data_loader import skip_first_batches as skip_first_batches
from .state import DistributedType as DistributedType
from .state import PartialState as PartialState
from .utils import AutocastKwargs as AutocastKwargs
from .utils import DataLoaderConfiguration as DataLoaderConfiguration
from .utils import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from .utils import GradScalerKwargs as GradScalerKwargs
from .utils import InitProcessGroupKwargs as InitProcessGroupKwargs
from .utils import debug_launcher as debug_launcher
from .utils import find_executable_batch_size as find_executable_batch_size
from .utils import init_empty_weights as init_empty_weights
from .utils import init_on_device as init_on_device
from .utils import load_checkpoint_in_model as load_checkpoint_in_model
from .utils import notebook_launcher as notebook_launcher
from .utils import synchronize_rng_states as synchronize_rng_states

#: The version of Accelerate whose names these are: scripts compare it with what they need.
__version__ = "1.15.0"


def __getattr__(name: str) -> Any:
    return utils.find_name(__name__, name)


for _module in (accelerator, data_loader, logging, state, tracking):
    vars(_module)["__getattr__"] = functools.partial(utils.find_name, _module.__name__)


def _add_modules(parent: ModuleType, names: str, module: ModuleType | None = None) -> None:
    """Make Accelerate's names of modules importable, where one module here serves several.

    Without `module` each is one in which no name is offered.
    """
    for name in names.split():
        path = f"{parent.__name__}.{name}"
        made = sys.modules[path] = module or ModuleType(path)
        vars(made).setdefault("__getattr__", functools.partial(utils.find_name, path))
        vars(parent).setdefault(name, made)  # `tqdm` is a function


_this = sys.modules[__name__]
_add_modules(_this, "big_modeling checkpointing hooks inference launchers", utils)
_add_modules(_this, "local_sgd memory_utils parallelism_config", utils)
_add_modules(_this, "optimizer scheduler", accelerator)
_add_modules(utils, "ao bnb constants dataclasses deepspeed environment fsdp_utils imports", utils)
_add_modules(utils, "launch megatron_lm memory modeling offload operations other random", utils)
_add_modules(utils, "rich torch_xla tqdm transformer_engine versions", utils)
_add_modules(_this, "test_utils test_utils.testing test_utils.training test_utils.examples")
_add_modules(_this, "commands commands.config commands.launch commands.env commands.utils")
