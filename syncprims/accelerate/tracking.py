"""Trackers by name, and the class for one of your own."""

from __future__ import annotations

import functools
from typing import Any

import syncprims
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
    """Make a method of a tracker run on rank 0 only, if its ``main_process_only`` is true."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not syncprims.is_main():
            return None
        return function(self, *args, **kwargs)

    return call


def __getattr__(name: str) -> Any:
    raise _not_offered(__name__, name)
