"""Trackers by name, and the class for one of your own."""

from __future__ import annotations

from typing import Any

from syncprims.training.accelerate.tracking import JsonLinesTracker as JsonLinesTracker
from syncprims.training.accelerate.tracking import MlflowTracker as MLflowTracker
from syncprims.training.accelerate.tracking import TensorBoardTracker as TensorBoardTracker
from syncprims.training.accelerate.tracking import Tracker as GeneralTracker
from syncprims.training.accelerate.tracking import WandbTracker as WandBTracker
from syncprims.training.accelerate.tracking import available_trackers as get_available_trackers

from .utils import not_offered as _not_offered

__all__ = [
    "GeneralTracker",
    "JsonLinesTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "get_available_trackers",
    "on_main_process",
]


def on_main_process(function: Any) -> Any:
    """Make a method of a tracker run on rank 0 only."""
    import syncprims

    return syncprims.on_main(function)


def __getattr__(name: str) -> Any:
    raise _not_offered(__name__, name)
