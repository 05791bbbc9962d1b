"""A marked test in its world, with one schedule or several."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest

from .worlds import run_world

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .plugin import Wanted


def run_marked(
    body: Callable[..., Any],
    arguments: Mapping[str, Any],
    wanted: Wanted,
    options: Mapping[str, Any],
) -> None:
    """Run a test's body once per rank, and so for every schedule."""
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(body):
        raise pytest.UsageError("pytest.mark.world runs plain functions: call asyncio.run inside")
    passed = {
        name: value
        for name, value in options.items()
        if name in ("seed", "faults", "timeout", "start", "nodes")
    }
    fn = functools.partial(_body, functools.partial(body, **arguments))
    if wanted.kind == "threads":
        passed.pop("start", None)  # it is for the worlds of processes beside
        if wanted.schedules > 1:
            from .explore import explore

            explore(fn, wanted.ranks, schedules=wanted.schedules, **passed)
            return
    else:
        passed.pop("seed", None)
        passed["backend"] = wanted.backend
    run_world(fn, wanted.ranks, kind=wanted.kind, **passed)  # type: ignore[arg-type]


def _body(body: Callable[[], Any]) -> None:
    """Run a body whose result is nobody's: pytest warns of those that return one."""
    __tracebackhide__ = True
    body()
