"""Classic bugs of programs with ranks.

Each function above the list `BUGS` is one. ``python -m support.rank_bugs`` writes the report for
each bug, which test_rank_bugs.py compares. Line numbers are relative to the first line of a bug, so
that bugs can move.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

import syncprims as sp
from syncprims.testing import access, run_world

GOLDEN = Path(__file__).with_suffix(".json")
RANKS = 3


# -- calls that some ranks do not make -------------------------------------------------------------


def skipped_barrier() -> None:
    if sp.is_main():
        sp.barrier("prepared")


def continue_past_a_collective() -> None:
    for step in range(3):
        if step == 1 and sp.get_rank() == 2:
            continue  # a bad batch
        sp.all_reduce(step)


def validation_on_main_only() -> None:
    def validate() -> float:
        return sp.all_reduce(0.5, "mean")

    sp.barrier("epoch end")
    if sp.is_main():
        validate()


def trigger_checked_on_one_rank() -> None:
    trigger = sp.Trigger("stop")
    trigger.set()
    if sp.is_main():
        trigger.check()


def deferred_checks_uneven() -> None:
    trigger = sp.Trigger("stop", lag=1)
    for _ in range(3 + (sp.get_rank() == 1)):
        trigger.check()


def clean_exit_of_one_rank() -> None:
    sp.barrier("start")
    if sp.get_rank() == 1:
        sys.exit(0)
    sp.all_reduce(1)


def shared_function_called_on_main_only() -> None:
    @sp.on_main(share=True)
    def config() -> dict[str, float]:
        return {"lr": 0.1}

    if sp.is_main():
        config()


def in_turn_entered_by_some() -> None:
    if sp.get_rank() != 1:
        with sp.in_turn():
            pass


def group_made_by_its_members_only() -> None:
    if sp.get_rank() < 2:
        sp.group([0, 1]).barrier()
    sp.barrier("all")


# -- calls that differ ----------------------------------------------------------------------------


def different_names() -> None:
    sp.barrier(f"epoch {sp.get_rank() // 2}")


def wrong_src() -> None:
    sp.broadcast({"lr": 0.1}, src=sp.get_rank())


def collective_inside_main_first() -> None:
    with sp.main_first(name="prepare"):
        sp.all_reduce(1)


def keys_in_different_orders() -> None:
    keys = ["weight", "bias"] if sp.get_rank() else ["bias", "weight"]
    for key in keys:
        sp.assert_same(0.0, key)


def groups_in_different_orders() -> None:
    pair = sp.group([0, 1])
    if sp.get_rank() == 0:
        pair.barrier()
    sp.barrier()
    if sp.get_rank() == 1:
        pair.barrier()


def extra_barrier_after_an_error_that_is_caught() -> None:
    with contextlib.suppress(KeyError):
        if sp.get_rank() == 2:
            sp.barrier("recover")
            raise KeyError("batch")
    sp.all_reduce(1)


def source_outside_of_the_group() -> None:
    pair = sp.group([0, 1])
    if sp.get_rank() < 2:
        pair.broadcast("x", src=2)


# -- values that differ ---------------------------------------------------------------------------


def different_shapes() -> None:
    sp.all_reduce(np.zeros(2 + (sp.get_rank() == 1)))


def missing_key_on_one_rank() -> None:
    metrics = {"loss": 1.0, "accuracy": 0.5}
    if sp.get_rank() == 2:
        del metrics["accuracy"]
    sp.all_reduce(metrics)


def different_seeds() -> None:
    sp.assert_same(sp.get_rank() // 2, "seed")


# -- ranks that fail -------------------------------------------------------------------------------


def exception_before_a_broadcast() -> None:
    config = None
    if sp.is_main():
        raise FileNotFoundError("config.yaml")
    sp.broadcast(config)


def failure_inside_main_first() -> None:
    with sp.main_first():
        if sp.is_main():
            raise OSError("no room for the cache")
    sp.barrier()


def error_swallowed_on_one_rank() -> None:
    with contextlib.suppress(TypeError):
        sp.all_reduce("loss" if sp.get_rank() == 1 else 1.0)


# -- what only some orders show --------------------------------------------------------------------

shared: dict[str, Any] = {}  # shared by threads, like a file between processes


def forgotten_save_barrier() -> None:
    if sp.is_main():
        shared.clear()
    sp.barrier("trained")
    access("checkpoint", write=sp.is_main())
    if sp.is_main():
        shared["saved"] = "weights"
    assert "saved" in shared, "no checkpoint yet"


def order_of_arrival_taken_for_rank_order() -> None:
    if sp.is_main():
        shared["arrived"] = []
    sp.barrier("start")
    access("arrived")
    shared["arrived"].append(sp.get_rank())
    sp.barrier("end")
    assert shared["arrived"] == [0, 1, 2], "ranks are out of order"


BUGS: dict[str, Callable[[], Any]] = {
    name: thing
    for name, thing in list(globals().items())
    if isinstance(thing, FunctionType) and thing.__module__ == __name__
}
#: Bugs that only some schedules show, through data that threads share.
BY_ORDER = ["forgotten_save_barrier", "order_of_arrival_taken_for_rank_order"]
ALWAYS = sorted(BUGS.keys() - set(BY_ORDER))


# -- the reports ----------------------------------------------------------------------------------


def said(program: Callable[[], Any], **options: Any) -> str:
    """Return the report of a world on a program, or that it found nothing."""
    try:
        run_world(program, RANKS, **options)
    except BaseException as error:
        return described(program, error)
    return "nothing"


def described(program: Callable[[], Any], error: BaseException) -> str:
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("replay")]
    text = "\n".join([f"{type(error).__name__}: {error}", *notes])
    text = re.sub(r"\n\d+ of \d+ schedules fail.*", "", text)
    text = re.sub(r"digest \w+", "digest ...", text)
    text = re.sub(r"(?s)\n  traceback of rank.*?\n(?=Fix)", "\n", text)
    first = program.__code__.co_firstlineno
    return re.sub(
        r"[^\s(]*rank_bugs\.py:(\d+)", lambda found: f"bug.py:{int(found[1]) - first + 1}", text
    )


def main() -> None:
    found = {name: said(BUGS[name]) for name in ALWAYS}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
