"""Run this on one rank only: decorators that ask at each call which rank this is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from .world import current, topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from .group import Group

P = ParamSpec("P")
R = TypeVar("R")


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class _Place(NamedTuple):
    """The rank that runs, and this one, both counted in the world or on the node."""

    chosen: int
    mine: int
    among: int


@overload
def on_main(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def on_main(*, default: Any = None, share: bool = False) -> _Decorator: ...
def on_main(
    fn: Callable[..., Any] | None = None, /, *, default: Any = None, share: bool = False
) -> Any:
    """Make a function run on rank 0 only; the others return `default`.

    With ``share=True`` all ranks call it together and all return rank 0's result; if it raises,
    rank 0 raises that, and the others `PeerFailed` with its traceback. Works with and without
    parentheses, and on ``async def``.
    """
    return _only("on_main", _world(lambda size: 0), fn, default, share)


@overload
def on_last(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def on_last(*, default: Any = None, share: bool = False) -> _Decorator: ...
def on_last(
    fn: Callable[..., Any] | None = None, /, *, default: Any = None, share: bool = False
) -> Any:
    """Make a function run on the highest rank only. Otherwise as :func:`on_main`."""
    return _only("on_last", _world(lambda size: size - 1), fn, default, share)


@overload
def on_local_main(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def on_local_main(*, default: Any = None, share: bool = False) -> _Decorator: ...
def on_local_main(
    fn: Callable[..., Any] | None = None, /, *, default: Any = None, share: bool = False
) -> Any:
    """Make a function run on the first rank of each node only. Otherwise as :func:`on_main`.

    With ``share=True`` the ranks of a node share; no node waits for another.
    """
    return _only("on_local_main", _node(0), fn, default, share)


def on_rank(n: int, /, *, default: Any = None, share: bool = False) -> _Decorator:
    """Make a function run on rank `n` only. Otherwise as :func:`on_main`.

    The decorated function raises ValueError on every rank if there is no rank `n`.
    """
    decorator: _Decorator = _only("on_rank", _world(lambda size: n), None, default, share)
    return decorator


def on_local_rank(n: int, /, *, default: Any = None, share: bool = False) -> _Decorator:
    """Make a function run on local rank `n` of each node only. As :func:`on_local_main`."""
    decorator: _Decorator = _only("on_local_rank", _node(n), None, default, share)
    return decorator


def _world(choose: Callable[[int], int]) -> Callable[[], _Place]:
    def place() -> _Place:
        here = topology()
        return _Place(choose(here.world_size), here.rank, here.world_size)

    return place


def _node(n: int) -> Callable[[], _Place]:
    def place() -> _Place:
        here = topology()
        return _Place(n, here.local_rank, here.local_world_size)

    return place


def _only(
    kind: str,
    place: Callable[[], _Place],
    fn: Callable[..., Any] | None,
    default: Any,
    share: bool,
) -> Any:
    if fn is None:
        return functools.partial(_only, kind, place, default=default, share=share)
    if not callable(fn):
        raise TypeError(f"{kind} decorates a function, not a {type(fn).__name__}")

    def group() -> Group:
        world = current()
        return world.node_group if "local" in kind else world.group

    def runs_here() -> bool:
        chosen, mine, among = place()
        if not 0 <= chosen < among:
            where = "on this node" if "local" in kind else "in this world"
            raise ValueError(f"{kind}({chosen}): there are {among} ranks {where}, 0 to {among - 1}")
        return chosen == mine

    def share_result(result: Any) -> Any:
        members = group()
        return members.send(kind, result, members.ranks[place().chosen])

    def share_failure(error: BaseException) -> None:
        members = group()
        members.send_failure(kind, error, members.ranks[place().chosen])

    import inspect  # slow to import: not before something is decorated

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            result = default
            if runs_here():
                try:
                    result = await fn(*args, **kwargs)
                except BaseException as error:
                    if share:
                        share_failure(error)
                    raise
            return share_result(result) if share else result

        return call_async

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = default
        if runs_here():
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                if share:
                    share_failure(error)
                raise
        return share_result(result) if share else result

    return call
