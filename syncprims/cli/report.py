"""The report on a run that failed: the ranks that followed in one line, the cause at the end."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from syncprims.errors import Failure, describe_exit, format_ranks, parse_ranks

_LONGEST_LINE = 400  # characters of a cause in a line


class EndedRank(NamedTuple):
    """A rank that failed by itself."""

    rank: int
    status: int  #: as :func:`os.waitstatus_to_exitcode`
    failure: Failure | None  #: what it has reported, if anything
    tail: Sequence[str]  #: the last lines it wrote to stderr

    @property
    def follows(self) -> bool:
        """Whether it failed only because another rank had failed, or all together."""
        return self.failure is not None and self.failure.consequence

    @property
    def kind(self) -> str:
        """The class of its error."""
        return "" if self.failure is None else self.failure.type.removeprefix("syncprims.")

    @property
    def how(self) -> str:
        """How its process ended, and with which error."""
        text = f"({describe_exit(self.status)})"
        if self.failure is not None:
            text += f": {self.failure.headline.removeprefix('syncprims.')}"
        return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def describe_failure(failed: Sequence[EndedRank], stopped: Sequence[int]) -> tuple[list[str], int]:
    """Return the lines about a run that failed, and its exit code.

    `failed` are the ranks that failed, in the order in which they ended; `stopped` were ended.
    """
    causes = [one for one in failed if not one.follows]
    lines: list[str] = []
    if stopped:
        lines.append(f"{_name(stopped)}: still running then, and ended")
    if not causes:  # all have the same verdict, and no rank was first
        together = " together" if len(failed) > 1 else ""
        first = failed[0]
        same = [one for one in failed if one.kind == first.kind]
        others = [one for one in failed if one.kind != first.kind]
        lines += _group(others, "failed, too")
        who = _name(one.rank for one in same)
        lines.append(f"syncprims run: {who} failed{together} {first.how}")
        text = "" if first.failure is None else first.failure.message
        lines += [f"  | {line}" for line in text.rstrip().splitlines()[1:]]
    else:
        first, *more = causes
        followers = collections.defaultdict[str, list[int]](list)
        for one in failed:
            if one.follows:
                followers[one.kind].append(one.rank)
        lines += [
            f"{_name(ranks)}: {kind} because of rank {first.rank}"
            for kind, ranks in followers.items()
        ]
        lines += _group(more, "failed, too")
        lines.append(f"syncprims run: rank {first.rank} failed first {first.how}")
        shown = first.tail
        if first.failure is not None:
            shown = first.failure.traceback.rstrip().splitlines()
        lines += [f"  | {line}" for line in shown]
    status = first.status
    return lines, 128 - status if status < 0 else status


def _group(failed: Iterable[EndedRank], what: str) -> list[str]:
    """Return a line for all that failed in one way."""
    ways = collections.defaultdict[str, list[int]](list)
    for one in failed:
        ways[one.how].append(one.rank)
    return [f"{_name(ranks)} {what} {how}" for how, ranks in ways.items()]


def _name(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-4, 6, 7``."""
    spans = [parse_ranks(span) for span in format_ranks(sorted(ranks)).split(",")]
    parts = [
        f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    ]
    several = len(spans) > 1 or len(spans[0]) > 1
    return f"rank{'s' * several} {', '.join(parts)}"
