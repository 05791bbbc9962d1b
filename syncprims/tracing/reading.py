"""Reading the trace files of a run, complete, truncated, damaged or foreign."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from syncprims.errors import ConfigurationError, parse_ranks
from syncprims.interface import Label

from .recorder import CALL, ENTRY, FORMAT, LEFT, LOST, OUTCOME, ROUND, TEXT, WAITING

T = TypeVar("T")
#: The members, which are processes, by rank; the name of the board, if it has one; and the epoch.
Group = tuple[tuple[int, ...], str, int]

_WORDS = ("posted", "since", "done", "number")
_ENTRY = np.dtype([*((name, "<i8") for name in _WORDS), ("tag", "<u8")])
_MOST_OF_FACTS = 4096  # bytes at the beginning of a file
#: A round in memory. Times are in ns; `done` is 0 where it is not known. Where a rank still waits,
#: `done` is when it was last seen waiting, and the outcome is the ranks that it waits for.
ROUNDS = np.dtype(
    [(name, "i8") for name in _WORDS]
    + [("group", "i4"), ("call", "i4"), ("outcome", "i4"), ("kind", "u1")]
)
assert _ENTRY.itemsize == ENTRY.size


class Numbered(list[T]):
    """Things that rounds refer to by number; a thing has the same number on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: T, key: Hashable) -> int:
        """Return the number of the thing with this key."""
        number = self._numbers.setdefault(key, len(self))
        if number == len(self):
            self.append(thing)
        return number


@dataclass
class RankTrace:
    """What one rank has recorded."""

    rank: int  #: the number of its process, which is its rank at the start of the run
    world_size: int  #: when it joined
    host: str
    clock: str
    wall: int  #: ns of the calendar, at the time `monotonic` of its own clock
    monotonic: int
    rounds: NDArray[Any]  #: of ROUNDS, by group and number
    left: tuple[int, str] | None  #: when it left the world, and with what error
    dropped: bool  #: its oldest rounds were overwritten

    @property
    def last_event(self) -> float:
        """When the rank was last seen, in ns."""
        latest = [self.rounds[name].max(initial=0) for name in ("posted", "done")]
        return float(max(*latest, self.left[0] if self.left else 0))


@dataclass
class TraceRun:
    """The traces of one run."""

    name: str
    calls: Numbered[Label] = field(default_factory=Numbered[Label])
    groups: Numbered[Group] = field(default_factory=Numbered[Group])
    outcomes: Numbered[str] = field(default_factory=Numbered[str])
    ranks: list[RankTrace] = field(default_factory=list[RankTrace])
    lost: dict[int, str] = field(default_factory=dict[int, str])  #: how, if the others know it
    complaints: list[str] = field(default_factory=list[str])

    @property
    def members(self) -> list[int]:
        """All that took part, those without a trace included."""
        return sorted({*range(self.ranks[0].world_size)}.union(*self.epochs.values()))

    @cached_property
    def epochs(self) -> dict[int, tuple[int, ...]]:
        """The processes of each epoch, by rank."""
        found: dict[int, tuple[int, ...]] = {}
        for members, _, epoch in self.groups:
            found[epoch] = max(found.get(epoch, ()), members, key=len)
        return found

    @property
    def noun(self) -> str:
        """What has a number: in an elastic run a rank has another one in each epoch."""
        return "process" if len(self.epochs) > 1 else "rank"

    def names(self, members: Sequence[int]) -> str:
        """Return ``ranks 0, 1 and 2``."""
        if len(members) == 1:
            return f"{self.noun} {members[0]}"
        many = "processes" if self.noun == "process" else "ranks"
        return f"{many} {', '.join(map(str, members[:-1]))} and {members[-1]}"


def find_runs(directory: Path) -> list[Path]:
    """Return the folders of all runs in `directory`, which may be one itself; the latest is last.

    :raises ConfigurationError: if there is none, or the directory cannot be read.
    """
    try:
        if not directory.is_dir():
            what = f"{directory} is no directory"
            raise ConfigurationError(f"{what}: give the one that SYNCPRIMS_TRACE named in the run")
        folders = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    except OSError as error:
        what = f"{directory} cannot be read: {error}"
        raise ConfigurationError(f"{what}; run the command as the user of the job") from error
    runs = [folder for folder in folders if any(folder.glob("rank-*.trace"))]
    if not runs:
        what = f"{directory} holds no trace"
        raise ConfigurationError(f"{what}: a run with SYNCPRIMS_TRACE={directory} records one")
    return sorted(runs, key=lambda folder: (_start_time(folder), folder.name))


def _start_time(folder: Path) -> int:
    """Return the calendar time in ns at which a run began, from its first readable file."""
    for path in sorted(folder.glob("rank-*.trace")):
        with contextlib.suppress(OSError), path.open("rb") as file:  # `read_run` reports an error
            if facts := _find_facts(_texts_of(_entries_of(file.read(_MOST_OF_FACTS)))):
                return int(facts["wall"])
    return 0


def read_run(folder: Path) -> TraceRun:
    """Return what the ranks of a run have recorded, with a complaint for what cannot be read.

    :raises ConfigurationError: if nothing can be read.
    """
    run = TraceRun(folder.name)
    run.outcomes.number("", "")
    traces = [_read_file(path, run) for path in sorted(folder.glob("rank-*.trace"))]
    run.ranks = sorted(filter(None, traces), key=lambda trace: trace.rank)
    if not run.ranks:
        complaints = "\n".join(f"  {complaint}" for complaint in run.complaints)
        raise ConfigurationError(f"nothing in {folder} can be read:\n{complaints}")
    if missing := sorted({*run.members} - {rank.rank for rank in run.ranks}):
        what = f"no trace of {run.names(missing)} can be read"
        run.complaints.append(f"{what}: waiting for others may in truth be waiting for these")
    return run


def _entries_of(data: bytes) -> NDArray[Any]:
    return np.frombuffer(data, _ENTRY, len(data) // _ENTRY.itemsize)


def _texts_of(entries: NDArray[Any]) -> dict[int, str]:
    """Return the texts that these entries define, by their numbers."""
    pieces: dict[int, bytes] = {}
    for entry in entries[entries["tag"] & 0xFF == TEXT]:
        number = int(entry["tag"]) >> CALL
        pieces[number] = pieces.get(number, b"") + entry.tobytes()[: -entry["tag"].nbytes]
    return {
        number: text.rstrip(b"\0").decode("utf-8", "replace") for number, text in pieces.items()
    }


def _find_facts(texts: dict[int, str]) -> dict[str, Any] | None:
    """Return the facts of a record; None if they are damaged."""
    with contextlib.suppress(KeyError, ValueError):
        check, facts = texts[0].removeprefix(FORMAT).split(" ", 1)
        if int(check, 16) == zlib.crc32(facts.encode()):
            found: dict[str, Any] = json.loads(facts)
            return found
    return None


def _read_file(path: Path, run: TraceRun) -> RankTrace | None:
    parts: list[NDArray[Any]] = []
    facts: dict[str, Any] | None = None
    left: tuple[int, str] | None = None
    older = path.with_name(f"{path.name}.old")
    for part in [older, path] if older.exists() else [path]:
        try:
            entries = _entries_of(part.read_bytes())
        except OSError as error:
            run.complaints.append(f"{part.name} cannot be read: {error}")
            continue
        texts = _texts_of(entries)
        its_facts = _find_facts(texts)
        if its_facts is None:
            run.complaints.append(f"{part.name} is no trace, or is damaged or cut off at its start")
            continue
        facts = facts or its_facts  # of the older one: whether it is the oldest
        texts[0] = ""  # in a tag, 0 stands for no outcome
        rounds, damaged, left = _read_rounds(entries, texts, run)
        parts.append(rounds)
        if damaged:
            run.complaints.append(f"{part.name}: {damaged} entries are damaged, and left out")
    if facts is None:
        return None
    return RankTrace(**facts, rounds=_unique_rounds(np.concatenate(parts)), left=left)


def _read_rounds(
    entries: NDArray[Any], texts: dict[int, str], run: TraceRun
) -> tuple[NDArray[Any], int, tuple[int, str] | None]:
    """Return the rounds, the number of damaged entries, and when and how the rank left."""
    kinds = entries["tag"] & 0xFF
    left: tuple[int, str] | None = None
    for lost in entries[kinds == LOST]:
        run.lost[int(lost["number"])] = texts.get(_outcomes_of(lost), "")
    for last in entries[kinds == LEFT]:
        left = int(last["posted"]), texts.get(_outcomes_of(last), "")
    written = entries[(kinds == ROUND) | (kinds == WAITING)]
    rounds = np.zeros(len(written), ROUNDS)
    for name in _WORDS:
        rounds[name] = written[name]
    rounds["kind"] = written["tag"] & 0xFF
    outcomes, calls = _outcomes_of(written), written["tag"] >> CALL
    for code in np.unique(outcomes):
        text = texts.get(int(code), "")
        rounds["outcome"][outcomes == code] = run.outcomes.number(text, text)
    rounds["call"] = -1
    for code in np.unique(calls):
        try:
            group, *call = json.loads(texts[int(code)])
            ranks, _, board = group.partition(" ")
            ranks, _, epoch = ranks.partition("@")
            its_group = tuple(parse_ranks(ranks)), board, int(epoch or 0)
            its_call = run.calls.number(Label(*call), json.dumps(call))
        except (AttributeError, KeyError, ValueError, TypeError):
            continue
        chosen = calls == code
        rounds["call"][chosen] = its_call
        rounds["group"][chosen] = run.groups.number(its_group, its_group)
    over = (rounds["kind"] == ROUND) | (rounds["done"] > 0)
    ordered = (rounds["posted"] <= rounds["since"]) & (rounds["since"] <= rounds["done"])
    sound = (rounds["posted"] >= 0) & (rounds["number"] > 0) & (rounds["call"] >= 0)
    sound &= ordered | ~over
    damaged = int(((kinds < TEXT) | (kinds > LOST)).sum()) + int((~sound).sum())
    return rounds[sound], damaged, left


def _outcomes_of(entries: NDArray[Any]) -> Any:
    """Return the numbers of the texts of outcomes."""
    # Before numpy 2, the tag of a single entry takes no int.
    return (entries["tag"] & np.uint64(0xFFFFFFFF)) >> np.uint64(OUTCOME)


def _unique_rounds(rounds: NDArray[Any]) -> NDArray[Any]:
    """Return each round once: over rather than waiting, and as it was written last."""
    rounds = rounds[np.lexsort((rounds["kind"], rounds["number"], rounds["group"]))]
    following = rounds[["group", "number"]][1:]
    is_last = np.append(following != rounds[["group", "number"]][:-1], True)
    unique: NDArray[Any] = rounds[is_last[: len(rounds)]]
    return unique
