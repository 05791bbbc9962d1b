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
    causes = [end for end in failed if not end.follows]
    first, verb = (causes or failed)[0], "failed first"
    leaders = [first]
    if not causes:  # all have the same verdict, and no rank was first
        leaders = [end for end in failed if end.kind == first.kind]
        verb = "failed together" if len(failed) > 1 else "failed"
    ways = collections.defaultdict[str, list[int]](list)
    for end in failed:
        if causes and end.follows:
            ways[f"{end.kind} because of rank {first.rank}"].append(end.rank)
    lines = [f"{_name(stopped)}: still running then, and ended"] if stopped else []
    lines += [f"{_name(ranks)}: {how}" for how, ranks in ways.items()]
    ways.clear()
    for end in causes or failed:
        if end not in leaders:
            ways[f"failed, too {end.how}"].append(end.rank)
    lines += [f"{_name(ranks)} {how}" for how, ranks in ways.items()]
    lines.append(f"syncprims run: {_name(end.rank for end in leaders)} {verb} {first.how}")
    shown = first.tail
    if first.failure is not None:
        shown = first.failure.traceback.rstrip().splitlines()
        if not causes:
            shown = first.failure.message.rstrip().splitlines()[1:]
    lines += [f"  | {line}" for line in shown]
    return lines, 128 - first.status if first.status < 0 else first.status


def _name(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-4, 6, 7``."""
    spans = [parse_ranks(span) for span in format_ranks(sorted(ranks)).split(",")]
    parts = [
        f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    ]
    several = len(spans) > 1 or len(spans[0]) > 1
    return f"rank{'s' * several} {', '.join(parts)}"
