"""Decorators that run a function on one rank only, decided at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from syncprims._protocol.validation import whole_number
from syncprims._world.group import SharedResult, innermost_group
from syncprims._world.runtime import get_host_number, get_topology, get_world

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True)
Fn = Callable[..., Any]


class _Shared(Protocol):
    """The decorated function returns the result on every rank."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class _OrDefault(Protocol[D_co]):
    """The decorated function returns the default on the ranks on which it does not run."""

    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | D_co]]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R | D_co]: ...


class _OnOneRank(Protocol):
    """The decorators that work with and without parentheses."""

    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R | None]: ...
    @overload
    def __call__(
        self, *, default: object = None, share: Literal[True], name: str | None = None
    ) -> _Shared: ...
    @overload
    def __call__(
        self, *, default: D, share: bool = False, name: str | None = None
    ) -> _OrDefault[D]: ...
    @overload
    def __call__(self, *, share: bool = False, name: str | None = None) -> _OrDefault[None]: ...


class _OnNumber(Protocol):
    """The decorators that take the number of a rank."""

    @overload
    def __call__(
        self, n: int, *, default: object = None, share: Literal[True], name: str | None = None
    ) -> _Shared: ...
    @overload
    def __call__(
        self, n: int, *, default: D, share: bool = False, name: str | None = None
    ) -> _OrDefault[D]: ...
    @overload
    def __call__(
        self, n: int, *, share: bool = False, name: str | None = None
    ) -> _OrDefault[None]: ...


def _typed_on_one_rank(decorator: Callable[..., Any]) -> _OnOneRank:
    """Return `decorator`; a type checker then sees what each form of it returns."""
    return decorator


def _typed_on_number(decorator: Callable[..., Any]) -> _OnNumber:
    """Return `decorator`, as :func:`_typed_on_one_rank`."""
    return decorator


class _Choice(NamedTuple):
    """The one rank that runs, of the world or of each node."""

    call: str
    local: bool
    number: int | None  #: None is the last
    name: str | None  #: of the call that shares the result; None is the function's own

    def runs_here(self) -> bool:
        """Return whether this rank runs.

        :raises ValueError: if there is no such rank.
        """
        topology = get_topology()
        mine, count = topology.rank, topology.world_size
        if self.local:
            mine, count = get_host_number("local_rank"), get_host_number("local_world_size")
        chosen = count - 1 if self.number is None else self.number
        if not 0 <= chosen < count:
            where = "the node" if self.local else "the world"
            raise ValueError(
                f"{self.call}({chosen}): no such rank; {where} has ranks 0 to {count - 1}"
            )
        return chosen == mine

    def find_shared_result(self) -> SharedResult:
        """Return the ranks that share the result, and which of them has it.

        :raises ValueError: if not all of them are in the group that is entered: no other rank
            makes the call.
        """
        world, within = get_world(), innermost_group()
        members = world.node_group() if self.local else world.group
        src = members.ranks[-1 if self.number is None else self.number]
        needed = members.ranks if self.local else (src,)
        if within is not None and not set(needed) <= set(within.ranks):
            raise ValueError(
                f"{self.call}(share=True) runs on rank {src}, for ranks {list(members.ranks)}, "
                f"and this is within a group of ranks {list(within.ranks)}: call it outside of the "
                f"group's block, or use the group's own broadcast()"
            )
        group = members if self.local else within or members
        return SharedResult(group, self.call, self.name, src)


@_typed_on_one_rank
def on_main(
    fn: Fn | None = None, /, *, default: object = None, share: bool = False, name: str | None = None
) -> Any:
    """Make a function run on rank 0 only; the others return `default`.

    With ``share=True`` all ranks call it together and all return rank 0's result; if it raises,
    rank 0 raises that, and the others `PeerFailed` with its traceback. The others wait without a
    timeout. Within a group's block the members share, and it is a `ValueError` if rank 0 is not
    among them. `name`, by default the function's own, is that of the call, and the same on all of
    them. Works with and without parentheses, and on ``async def``.

    :raises TypeError: if what is decorated is not a function.
    """
    return _decorate(fn, _Choice("on_main", False, 0, name), default=default, share=share)


@_typed_on_one_rank
def on_last(
    fn: Fn | None = None, /, *, default: object = None, share: bool = False, name: str | None = None
) -> Any:
    """Make a function run on the highest rank only; the others return `default`.

    With ``share=True`` all ranks return its result. Otherwise as :func:`on_main`.
    """
    return _decorate(fn, _Choice("on_last", False, None, name), default=default, share=share)


@_typed_on_one_rank
def on_local_main(
    fn: Fn | None = None, /, *, default: object = None, share: bool = False, name: str | None = None
) -> Any:
    """Make a function run on the first rank of each node only; the others return `default`.

    With ``share=True`` the ranks of a node share its result; no node waits for another. Otherwise
    as :func:`on_main`.
    """
    return _decorate(fn, _Choice("on_local_main", True, 0, name), default=default, share=share)


@_typed_on_number
def on_rank(n: int, *, default: object = None, share: bool = False, name: str | None = None) -> Any:
    """Make a function run on rank `n` only; the others return `default`.

    With ``share=True`` all ranks return its result. The decorated function raises ValueError on
    every rank if there is no rank `n`. Otherwise as :func:`on_main`.

    :raises TypeError: if `n` is not a whole number.
    """
    n = whole_number(n, "on_rank takes a rank, a whole number")
    return _decorate(None, _Choice("on_rank", False, n, name), default=default, share=share)


@_typed_on_number
def on_local_rank(
    n: int, *, default: object = None, share: bool = False, name: str | None = None
) -> Any:
    """Make a function run on local rank `n` of each node only; the others return `default`.

    With ``share=True`` the ranks of a node share its result; no node waits for another. The
    decorated function raises ValueError on a node that has no such rank. Otherwise as
    :func:`on_main`.

    :raises TypeError: if `n` is not a whole number.
    """
    n = whole_number(n, "on_local_rank takes a rank, a whole number")
    return _decorate(None, _Choice("on_local_rank", True, n, name), default=default, share=share)


def _decorate(fn: Fn | None, choice: _Choice, *, default: object, share: bool) -> Any:
    if fn is None:
        return functools.partial(_decorate, choice=choice, default=default, share=share)
    if not callable(fn):
        raise TypeError(f"{choice.call} decorates a function, not a {type(fn).__name__}")
    if choice.name is None:
        choice = choice._replace(name=getattr(fn, "__name__", None))
    import inspect  # slow to import: not before something is decorated

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def call_async(*args: object, **kwargs: object) -> Any:
            here = choice.runs_here()
            if not share:
                return await fn(*args, **kwargs) if here else default
            with choice.find_shared_result() as shared:
                result = await fn(*args, **kwargs) if here else default
            return shared.send(result)

        return call_async

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Any:
        here = choice.runs_here()
        if not share:
            return fn(*args, **kwargs) if here else default
        with choice.find_shared_result() as shared:
            result = fn(*args, **kwargs) if here else default
        return shared.send(result)

    return call
