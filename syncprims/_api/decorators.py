"""Run this on one rank only: decorators that ask at each call which rank this is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from syncprims._protocol.validation import whole_number
from syncprims._world.group import entered
from syncprims._world.runtime import current, topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncprims._world.group import Group

P = ParamSpec("P")
R = TypeVar("R")


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class _Choice(NamedTuple):
    """The one rank that runs, of the world or of each node."""

    call: str
    local: bool
    number: int | None  #: None is the last

    def runs_here(self) -> bool:
        """Tell whether this is the rank.

        :raises ValueError: if there is no such rank.
        """
        place = topology()
        mine, count = place.rank, place.world_size
        if self.local:
            mine, count = place.local_rank, place.local_world_size
        chosen = self._of(count)
        if not 0 <= chosen < count:
            where = "on this node" if self.local else "in this world"
            raise ValueError(
                f"{self.call}({chosen}): there are {count} ranks {where}, 0 to {count - 1}"
            )
        return chosen == mine

    def _of(self, count: int) -> int:
        return count - 1 if self.number is None else self.number

    def sharing(self) -> tuple[Group, int]:
        """Return the ranks that share the result, and whose it is.

        :raises ValueError: if not all of them are in the group that is entered: no one else calls.
        """
        world, within = current(), entered.get()
        everybody = world.node_group if self.local else world.group
        src = everybody.ranks[self._of(len(everybody.ranks))]
        if within is None:
            return everybody, src
        needed = everybody.ranks if self.local else (src,)
        if not set(needed) <= set(within.ranks):
            raise ValueError(
                f"{self.call}(share=True) runs on rank {src}, for ranks {list(everybody.ranks)}, "
                f"and this is within a group of ranks {list(within.ranks)}: call it outside of the "
                f"group's block, or use the group's own broadcast()"
            )
        return everybody if self.local else within, src


@overload
def on_main(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def on_main(*, default: Any = None, share: bool = False) -> _Decorator: ...
def on_main(
    fn: Callable[..., Any] | None = None, /, *, default: Any = None, share: bool = False
) -> Any:
    """Make a function run on rank 0 only; the others return `default`.

    With ``share=True`` all ranks call it together and all return rank 0's result; if it raises,
    rank 0 raises that, and the others `PeerFailed` with its traceback. Within a group's block the
    members share, and it is a `ValueError` if rank 0 is none of them. Works with and without
    parentheses, and on ``async def``.
    """
    choice = _Choice("on_main", False, 0)
    return _decorate(fn, choice, default=default, share=share)


@overload
def on_last(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def on_last(*, default: Any = None, share: bool = False) -> _Decorator: ...
def on_last(
    fn: Callable[..., Any] | None = None, /, *, default: Any = None, share: bool = False
) -> Any:
    """Make a function run on the highest rank only. Otherwise as :func:`on_main`."""
    choice = _Choice("on_last", False, None)
    return _decorate(fn, choice, default=default, share=share)


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
    choice = _Choice("on_local_main", True, 0)
    return _decorate(fn, choice, default=default, share=share)


def on_rank(n: int, *, default: Any = None, share: bool = False) -> _Decorator:
    """Make a function run on rank `n` only. Otherwise as :func:`on_main`.

    The decorated function raises ValueError on every rank if there is no rank `n`.
    """
    choice = _Choice("on_rank", False, whole_number(n, "on_rank takes a rank, a whole number"))
    decorator: _Decorator = _decorate(None, choice, default=default, share=share)
    return decorator


def on_local_rank(n: int, *, default: Any = None, share: bool = False) -> _Decorator:
    """Make a function run on local rank `n` of each node only. As :func:`on_local_main`."""
    choice = _Choice(
        "on_local_rank", True, whole_number(n, "on_local_rank takes a rank, a whole number")
    )
    decorator: _Decorator = _decorate(None, choice, default=default, share=share)
    return decorator


def _decorate(fn: Callable[..., Any] | None, choice: _Choice, *, default: Any, share: bool) -> Any:
    if fn is None:
        return functools.partial(_decorate, choice=choice, default=default, share=share)
    if not callable(fn):
        raise TypeError(f"{choice.call} decorates a function, not a {type(fn).__name__}")
    import inspect  # slow to import: not before something is decorated

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            result, here = default, choice.runs_here()
            shared = choice.sharing() if share else None
            if here:
                try:
                    result = await fn(*args, **kwargs)
                except BaseException as error:
                    if shared is not None:
                        shared[0].send_failure(choice.call, error, shared[1])
                    raise
            return result if shared is None else shared[0].send(choice.call, result, shared[1])

        return call_async

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        result, here = default, choice.runs_here()
        shared = choice.sharing() if share else None
        if here:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                if shared is not None:
                    shared[0].send_failure(choice.call, error, shared[1])
                raise
        return result if shared is None else shared[0].send(choice.call, result, shared[1])

    return call
