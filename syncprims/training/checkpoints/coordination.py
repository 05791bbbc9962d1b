"""Ranks save and load together: one directory, one outcome of each step, one error on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

from syncprims import CheckpointError, Failure, SyncError, get_rank
from syncprims._world.group import gather_as
from syncprims._world.runtime import get_active_group

T = TypeVar("T")

#: What the error of a save says that failed before its commit.
_UNCHANGED = (
    "What was there before still stands, and nothing else is left. Fix the cause, and save again."
)
_SAME_OBJECTS = (
    "Every rank passes the same objects under the same names, with the same tensors in them."
)


def meet(doing: str, path: str = "") -> list[int]:
    """Return the ranks that save or load together, once all of them have called this.

    They are those of the group that is entered, else all. The first of them leads: it does what
    only one rank may do.

    :raises CheckpointError: on all ranks, if they pass different directories.
    """
    call = _call_name(doing)
    gathered = gather_as(get_active_group(), call, [get_rank(), path])
    members = cast("list[tuple[int, str]]", gathered)
    first, first_path = members[0]
    for rank, other_path in members:
        if other_path != first_path:
            what = f"{call}: rank {rank} saves to {other_path}, and rank {first} to {first_path}"
            cure = "Pass the same absolute path on every rank: broadcast a name with a clock in it."
            raise CheckpointError(f"{what}. {cure}", path=other_path, rank=rank)
    return [member[0] for member in members]


def coordinate(
    doing: str, part: Callable[[], T], summarize: Callable[[T], Any] = lambda result: result
) -> tuple[T, list[Any]]:
    """Run ``part()`` on every rank; return its result, and the ranks' summaries in rank order.

    `part` communicates on all ranks alike, or not at all. There is no timeout. Ranks wait under the
    name of the call, the first word of `doing`.

    :raises CheckpointError: the same on all ranks, if `part` raised on any.
    """
    results: list[T] = []
    summary, own = None, None
    try:
        results.append(part())
        summary = summarize(results[0])
    except Exception as error:
        own = error
    path, number = getattr(own, "filename", None), getattr(own, "errno", None)
    message = {
        "failure": None if own is None else list(Failure.of(get_rank(), own)),
        "summary": summary,
        "path": None if path is None else str(path),
        "errno": number if isinstance(number, int) else None,
    }
    messages: list[Any] = gather_as(get_active_group(), _call_name(doing), message)
    failed = [message for message in messages if message["failure"] is not None]
    if failed:
        raise _common_error(doing, failed) from own
    return results[0], [message["summary"] for message in messages]


def _common_error(doing: str, failed: Sequence[dict[str, Any]]) -> CheckpointError:
    """Return the error that all ranks raise, made of the messages of those that failed."""
    failures = {failure.rank: failure for failure in (Failure(*m["failure"]) for m in failed)}
    rank, *others = failures
    cause, also = failures[rank], f" (ranks {others} failed, too)" if others else ""
    if cause.type == "syncprims.CheckpointError":  # its text needs no addition
        text = f"{doing}: rank {rank}: {cause.message}{also}"
    else:
        text = f"{doing}: rank {rank}: {cause.type}: {cause.message}{also}"
        if doing.startswith("save"):
            text = f"{text.removesuffix('.')}. {_UNCHANGED}"
    path, number = failed[0]["path"], failed[0]["errno"]
    return CheckpointError(text, path=path, errno=number, rank=rank, failures=failures)


def _call_name(doing: str) -> str:
    return doing.partition(" ")[0]


@contextlib.contextmanager
def cleanup_on_error(doing: str, clean_up: Callable[[], object]) -> Generator[None]:
    """Run ``clean_up()`` if the block raises; all have run it when an error of all is raised."""
    try:
        yield
    except BaseException as error:
        clean_up()
        if isinstance(error, CheckpointError):  # on all ranks
            with contextlib.suppress(SyncError):
                gather_as(get_active_group(), _call_name(doing), None)
        raise


def check_equal(
    doing: str, ranks: Sequence[int], digests: Sequence[str], what: str, cure: str = _SAME_OBJECTS
) -> None:
    """Raise if the digests, one of each rank, differ.

    :raises CheckpointError: on all ranks.
    """
    other = [rank for rank, one in zip(ranks, digests, strict=True) if one != digests[0]]
    if other:
        text = f"{doing}: ranks {other} {what} than rank {ranks[0]}. {cure}"
        raise CheckpointError(text, rank=other[0])
