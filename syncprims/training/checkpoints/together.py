"""Every rank does its part, and then either all go on or all raise the same error."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from syncprims import CheckpointError, Failure, SyncError, get_node_rank, get_rank
from syncprims._world.group import gather_as
from syncprims._world.runtime import get_active_group

from .directory import Named, check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from .directory import Directory

T = TypeVar("T")

#: What a save says that has failed before its commit.
STANDS = "What was there before still stands, and nothing else is left. Mend this, and save again."


class Told(NamedTuple, Generic[T]):
    """What a part came to here, and what it told on each rank."""

    own: T
    by_rank: list[Any]  #: in rank order


class Outcome(NamedTuple, Generic[T]):
    """What one rank's part came to."""

    result: T | None
    error: Exception | None  #: as it was raised here
    plain: dict[str, Any]  #: what the others get to know

    @classmethod
    def of(cls, part: Callable[[], T], tell: Callable[[T], Any]) -> Outcome[T]:
        """Return the outcome of ``part()``; an exception is one, too."""
        rank = get_rank()
        try:
            result = part()
            return cls(result, None, {"rank": rank, "told": tell(result), "failure": None})
        except Exception as error:
            return cls(None, error, {"rank": rank, "told": None, "failure": _describe(rank, error)})


def together(
    doing: str,
    part: Callable[[], T],
    tell: Callable[[T], Any] = lambda result: result,
    *,
    call: str = "",
    advice: str = "",
) -> Told[T]:
    """Return what ``part()`` returned here, and ``tell`` of that from each rank, in rank order.

    `part` does not synchronize. However long the others take, they are waited for, under the name
    of the user's `call`, with which `doing` begins if nothing else is said. `advice` says what to
    do where the system's own words do not.

    :raises CheckpointError: on all ranks and in the same words, if it raised on any.
    """
    mine = Outcome.of(part, tell)
    return settle(doing, mine, _gather(call or _call(doing), mine.plain), advice)


def _call(doing: str) -> str:
    return doing.partition(" ")[0]


def _gather(call: str, value: Any) -> list[Any]:
    return gather_as(get_active_group(), call, value)


def settle(
    doing: str, mine: Outcome[T], outcomes: Sequence[dict[str, Any]], advice: str = ""
) -> Told[T]:
    """Return what all outcomes say.

    :raises CheckpointError: if there is a failure among them.
    """
    failed = [outcome for outcome in outcomes if outcome["failure"] is not None]
    if failed:
        raise _error(doing, failed, advice) from mine.error
    own: Any = mine.result
    return Told(own, [outcome["told"] for outcome in outcomes])


@contextlib.contextmanager
def clearing(doing: str, clear: Callable[[], object]) -> Generator[None]:
    """If the block fails, raise once ``clear()`` is done: on all ranks, where all fail alike."""
    try:
        yield
    except BaseException as error:
        clear()
        if isinstance(error, CheckpointError):  # of all ranks, which are in step
            with contextlib.suppress(SyncError):
                _gather(_call(doing), None)
        raise


class Team(NamedTuple):
    """Those who save or load together: the ranks of the group that is entered, else all."""

    ranks: list[int]  #: their numbers in the world
    place: int  #: of this one among them

    @classmethod
    def met(cls, doing: str, directory: Directory | None = None) -> Team:
        """Return the team, once all are there.

        :raises CheckpointError: on all ranks, if they have other directories.
        """
        call = _call(doing)
        group = get_active_group()  # first: a world that runs may know more of its hosts
        given, path = directory or ("", "")
        told = gather_as(group, call, [get_rank(), get_node_rank(), given, path])
        named = [Named(*one) for one in cast("list[tuple[int, int, str, str]]", told)]
        check_same(call, named)
        ranks = [one.rank for one in named]
        return cls(ranks, ranks.index(get_rank()))

    @property
    def leads(self) -> bool:
        """Tell whether this is the rank that does what only one has to do."""
        return self.place == 0


def check_alike(doing: str, ranks: Sequence[int], what: str, digests: Sequence[str]) -> None:
    """Accept ranks that are about to save or load the same.

    :raises CheckpointError: on all ranks, otherwise.
    """
    other = [rank for rank, one in zip(ranks, digests, strict=True) if one != digests[0]]
    if other:
        raise CheckpointError(
            f"{doing}: ranks {other} have other {what} than rank {ranks[0]}. Every rank passes the "
            f"same objects under the same names, with the same tensors in them.",
            rank=other[0],
        )


def _describe(rank: int, error: Exception) -> dict[str, Any]:
    path = getattr(error, "filename", None)
    number = getattr(error, "errno", None)
    return {
        "failure": list(Failure.of(rank, error)),
        "refused": isinstance(error, CheckpointError),
        "path": None if path is None else str(path),
        "errno": number if isinstance(number, int) else None,
    }


def _error(doing: str, failed: Sequence[dict[str, Any]], advice: str) -> CheckpointError:
    first = failed[0]["failure"]
    failures = {outcome["rank"]: Failure(*outcome["failure"]["failure"]) for outcome in failed}
    ranks = list(failures)
    cause = failures[ranks[0]]
    said = cause.message if first["refused"] else f"{cause.type}: {cause.message}"
    message = f"{doing}: rank {ranks[0]}: {said}"
    if len(ranks) > 1:
        message += f" (ranks {ranks[1:]} failed, too)"
    if advice and not first["refused"]:
        message = f"{message.removesuffix('.')}. {advice}"
    return CheckpointError(
        message, path=first["path"], errno=first["errno"], rank=ranks[0], failures=failures
    )


def log() -> logging.Logger:
    """Return the library's logger."""
    return logging.getLogger("syncprims")
