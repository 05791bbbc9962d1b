"""Reading the trace files of a run, complete, truncated, damaged or foreign."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from syncprims.errors import ConfigurationError, parse_ranks
from syncprims.interface import Label
from syncprims.tracing import trace_file
from syncprims.tracing.trace_file import LEFT, POSTED, RESULT, ROUND, TEXT, WAITING

T = TypeVar("T")

_WORDS = ("posted", "since", "done", "number")
_ENTRY = np.dtype(
    [(name, "<i8") for name in _WORDS]
    + [("kind", "u1"), ("length", "u1"), ("outcome", "<u2"), ("label", "<u4")]
)
#: A round in memory. Times are in ns; `done` is 0 where it is not known. Where a rank still waits,
#: `done` is when it was last seen waiting, and the outcome is the ranks that it waits for.
ROUNDS = np.dtype(
    [(name, "i8") for name in _WORDS]
    + [("group", "i4"), ("call", "i4"), ("outcome", "i4"), ("kind", "u1")]
)
assert _ENTRY.itemsize == trace_file.ENTRY.size


class Numbered(list[T]):
    """Things that rounds refer to by number; a thing has the same number on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: T, key: Hashable) -> int:
        """Return the number of the thing with this key."""
        if key not in self._numbers:
            self._numbers[key] = len(self)
            self.append(thing)
        return self._numbers[key]


@dataclass
class RankTrace:
    """What one rank has recorded."""

    rank: int
    world_size: int
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
    groups: Numbered[tuple[int, ...]] = field(default_factory=Numbered[tuple[int, ...]])
    outcomes: Numbered[str] = field(default_factory=Numbered[str])
    ranks: list[RankTrace] = field(default_factory=list[RankTrace])
    complaints: list[str] = field(default_factory=list[str])

    @property
    def world_size(self) -> int:
        """The number of ranks, those without a trace included."""
        return max(rank.world_size for rank in self.ranks)


def find_runs(directory: Path) -> list[Path]:
    """Return the folders of all runs in `directory`, which may be one itself; the latest is last.

    :raises ConfigurationError: if there is none, or the directory cannot be read.
    """
    try:
        if not directory.is_dir():
            raise ConfigurationError(
                f"{directory} is no directory: give the one that SYNCPRIMS_TRACE named in the run"
            )
        folders = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    except OSError as error:
        raise ConfigurationError(
            f"{directory} cannot be read: {error}; run the command as the user of the job"
        ) from error
    runs = [folder for folder in folders if any(folder.glob("rank-*.trace"))]
    if not runs:
        raise ConfigurationError(
            f"{directory} holds no trace: a run with SYNCPRIMS_TRACE={directory} records one"
        )
    return sorted(runs, key=lambda folder: (_start_time(folder), folder.name))


def _start_time(folder: Path) -> int:
    """Return the calendar time in ns at which a run began, from its first readable file."""
    for path in sorted(folder.glob("rank-*.trace")):
        with contextlib.suppress(OSError), path.open("rb") as file:  # `read_run` reports an error
            if header := _read_header(file.read(trace_file.START)):
                return int(header[1]["wall"])
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
        raise ConfigurationError(
            f"nothing in {folder} can be read:\n" + "\n".join(f"  {c}" for c in run.complaints)
        )
    missing = sorted(set(range(run.world_size)) - {rank.rank for rank in run.ranks})
    if missing:
        run.complaints.append(
            f"no trace of ranks {missing} of {run.world_size} can be read: the command does not "
            f"know what these waited for, and attributes waiting for them to others"
        )
    return run


def _read_header(segment: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the number of a segment, and the facts of its record; None if they are damaged."""
    if len(segment) < trace_file.START or segment[:8] != trace_file.MAGIC:
        return None
    _, number, length, check = trace_file.HEADER.unpack_from(segment)
    text = segment[trace_file.HEADER.size :][:length]
    if len(text) != length or zlib.crc32(text, number & 0xFFFFFFFF) != check:
        return None
    return number, json.loads(text)


def _read_file(path: Path, run: TraceRun) -> RankTrace | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        run.complaints.append(f"{path.name} cannot be read: {error}")
        return None
    segments: dict[int, bytes] = {}
    facts: dict[str, Any] = {}
    for at in range(0, len(data), trace_file.SEGMENT):
        segment = data[at : at + trace_file.SEGMENT]
        if header := _read_header(segment):
            number, facts = header
            segments[number] = segment
        elif segment.strip(b"\0"):
            run.complaints.append(
                f"{path.name}: bytes {at} to {at + len(segment)} are damaged or not of a trace, "
                f"and left out"
            )
    if not segments:
        run.complaints.append(f"{path.name} is no trace, or is cut off before the first round")
        return None
    parts: list[NDArray[Any]] = []
    left: tuple[int, str] | None = None
    for number, segment in sorted(segments.items()):
        rounds, damaged, left_here = _read_segment(segment, run)
        parts.append(rounds)
        left = left_here or left
        if damaged:
            run.complaints.append(
                f"{path.name}: {damaged} entries of segment {number} are damaged, and left out"
            )
    about = {name: facts[name] for name in RankTrace.__annotations__ if name in facts}
    rounds = _unique_rounds(np.concatenate(parts))
    return RankTrace(**about, rounds=rounds, left=left, dropped=min(segments) > 0)


def _read_segment(
    segment: bytes, run: TraceRun
) -> tuple[NDArray[Any], int, tuple[int, str] | None]:
    """Return the rounds, the number of damaged entries, and when and how the rank left."""
    count = (len(segment) - trace_file.START) // _ENTRY.itemsize
    entries = np.frombuffer(segment, _ENTRY, count, trace_file.START)
    pieces: dict[int, bytes] = {}
    for entry in entries[entries["kind"] == TEXT]:
        number = int(entry["label"])
        pieces[number] = pieces.get(number, b"") + entry.tobytes()[: int(entry["length"])]
    texts = {number: text.decode("utf-8", "replace") for number, text in pieces.items()}
    left: tuple[int, str] | None = None
    for last in entries[entries["kind"] == LEFT]:
        left = int(last["posted"]), texts.get(int(last["outcome"]), "")
    written = entries[np.isin(entries["kind"], (ROUND, WAITING, POSTED, RESULT))]
    rounds = np.zeros(len(written), ROUNDS)
    for name in (*_WORDS, "kind"):
        rounds[name] = written[name]
    for code in np.unique(written["outcome"]):
        text = texts.get(int(code), "")
        rounds["outcome"][written["outcome"] == code] = run.outcomes.number(text, text)
    rounds["call"] = -1
    for code in np.unique(written["label"]):
        try:
            group, *call = json.loads(texts[int(code)])
            members = tuple(parse_ranks(texts[group].partition(" ")[0]))
            label = Label(*call)
        except (KeyError, ValueError, TypeError):
            continue
        chosen = written["label"] == code
        rounds["call"][chosen] = run.calls.number(label, json.dumps(call))
        rounds["group"][chosen] = run.groups.number(members, texts[group])
    over = (rounds["kind"] == ROUND) | (rounds["kind"] == RESULT) | (rounds["done"] > 0)
    ordered = (rounds["posted"] <= rounds["since"]) & (rounds["since"] <= rounds["done"])
    sound = (rounds["posted"] >= 0) & (rounds["number"] > 0) & (rounds["call"] >= 0)
    sound &= ordered | ~over
    damaged = int((entries["kind"] > LEFT).sum()) + int((~sound).sum())
    return rounds[sound], damaged, left


def _unique_rounds(rounds: NDArray[Any]) -> NDArray[Any]:
    """Return each round once: finished rather than waiting, and with its result."""
    if not len(rounds):
        return rounds
    priority = np.zeros(16, "i4")
    priority[[POSTED, WAITING, ROUND, RESULT]] = 0, 1, 2, 3
    rounds = rounds[np.lexsort((priority[rounds["kind"]], rounds["number"], rounds["group"]))]
    same = (rounds["number"][1:] == rounds["number"][:-1]) & (
        rounds["group"][1:] == rounds["group"][:-1]
    )
    results = np.flatnonzero((rounds["kind"][1:] == RESULT) & same) + 1
    rounds["outcome"][results - 1] = rounds["outcome"][results]
    keep = np.append(~same, True)  # the last entry of each round...
    keep[results - 1] = True  # ... but not one that has only its result
    keep[rounds["kind"] == RESULT] = False
    unique: NDArray[Any] = rounds[keep]
    return unique
