"""States of the rank, the job and its window."""

from __future__ import annotations

from syncprims.training.accelerate.state import AcceleratorState as AcceleratorState
from syncprims.training.accelerate.state import DistributedType as DistributedType
from syncprims.training.accelerate.state import GradientState as GradientState
from syncprims.training.accelerate.state import PartialState as PartialState
from syncprims.training.accelerate.state import is_initialized as is_initialized
