"""Reading the trace files of a run, complete, truncated, damaged or foreign."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from syncprims._protocol import trace_file
from syncprims._protocol.trace_file import LEFT, POSTED, RESULT, ROUND, TEXT, WAITING
from syncprims.errors import ConfigurationError, parse_ranks
from syncprims.interface import Label

_WORDS = ("posted", "since", "done", "number")
_ENTRY = np.dtype(
    [(name, "<i8") for name in _WORDS]
    + [("kind", "u1"), ("flags", "u1"), ("outcome", "<u2"), ("label", "<u4")]
)
#: A round in memory. Times are in ns; `done` is 0 where it is not known. Where a rank still waits,
#: `done` is when it was last seen waiting, and the outcome is the ranks that it waits for.
ROUNDS = np.dtype(
    [(name, "i8") for name in _WORDS]
    + [("group", "i4"), ("call", "i4"), ("outcome", "i4"), ("kind", "u1"), ("further", "?")]
)
assert _ENTRY.itemsize == trace_file.ENTRY.size


class TracedCall(NamedTuple):
    """A call of the library, and the line of the program that made it."""

    kind: str
    name: str | None
    src: int | None
    op: str | None
    site: str

    def __str__(self) -> str:
        return Label(*self).call


class NameTable:
    """What rounds refer to by number, the same numbers for all ranks."""

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        self.groups: list[tuple[int, ...]] = []
        self.outcomes: list[str] = [""]
        self._numbers: dict[tuple[str, Any], int] = {("outcome", ""): 0}

    def number(self, kind: str, thing: Any, key: Any = None) -> int:
        """Return the number of a thing, which is a call, group or outcome.

        Things that are equal have one number, unless they have different keys.
        """
        key = thing if key is None else key
        number = self._numbers.get((kind, key))
        if number is None:
            things: list[Any] = getattr(self, f"{kind}s")
            number = self._numbers[kind, key] = len(things)
            things.append(thing)
        return number


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
    left: tuple[int, str] | None = None  #: when it left the world, and with what error
    dropped: bool = False  #: its oldest rounds were overwritten


@dataclass
class TraceRun:
    """The traces of one run."""

    name: str
    names: NameTable = field(default_factory=NameTable)
    ranks: list[RankTrace] = field(default_factory=list[RankTrace])
    complaints: list[str] = field(default_factory=list[str])

    @property
    def world_size(self) -> int:
        """The number of ranks, those without a trace included."""
        return max(rank.world_size for rank in self.ranks)

    @property
    def title(self) -> str:
        """The name of the run and the number of its ranks."""
        return f"Run {self.name}, {self.world_size} rank{'s' * (self.world_size > 1)}"


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
        try:
            with path.open("rb") as file:
                found = _facts(file.read(trace_file.START))
        except OSError:  # `read_run` reports it
            continue
        if found is not None:
            return int(found[1].get("wall", 0))
    return 0


def read_run(folder: Path) -> TraceRun:
    """Return what the ranks of a run have recorded, with a complaint for what cannot be read.

    :raises ConfigurationError: if nothing can be read.
    """
    run = TraceRun(folder.name)
    for path in sorted(folder.glob("rank-*.trace"), key=lambda path: (len(path.name), path.name)):
        found = _read_file(path, run)
        if found is not None:
            run.ranks.append(found)
    if not run.ranks:
        raise ConfigurationError(
            f"nothing in {folder} can be read:\n" + "\n".join(f"  {c}" for c in run.complaints)
        )
    run.ranks.sort(key=lambda rank: rank.rank)
    missing = sorted(set(range(run.world_size)) - {rank.rank for rank in run.ranks})
    if missing:
        run.complaints.append(
            f"no trace of ranks {missing} of {run.world_size}: what they waited for is unknown, "
            f"and waiting for them is attributed to others"
        )
    return run


def _facts(data: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the number and the facts of the segment that begins with `data`; None if damaged."""
    if len(data) < trace_file.START or data[:8] != trace_file.MAGIC:
        return None
    _, number, length, check = trace_file.HEADER.unpack_from(data)
    text = data[trace_file.HEADER.size :][:length]
    if len(text) != length or zlib.crc32(text, number & 0xFFFFFFFF) != check:
        return None
    try:
        facts = json.loads(text)
    except ValueError:
        return None
    return (number, cast("dict[str, Any]", facts)) if isinstance(facts, dict) else None


def _read_file(path: Path, run: TraceRun) -> RankTrace | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        run.complaints.append(f"{path.name} cannot be read: {error}")
        return None
    segments: list[tuple[int, dict[str, Any], bytes]] = []
    for at in range(0, len(data), trace_file.SEGMENT):
        piece = data[at : at + trace_file.SEGMENT]
        found = _facts(piece)
        if found is not None:
            segments.append((*found, piece))
        elif piece.strip(b"\0"):
            run.complaints.append(
                f"{path.name}: bytes {at} to {at + len(piece)} are damaged or not of a trace, and "
                f"left out"
            )
    if not segments:
        run.complaints.append(f"{path.name} is no trace, or is cut off before the first round")
        return None
    segments.sort(key=lambda segment: segment[0])
    parts: list[NDArray[Any]] = []
    left: tuple[int, str] | None = None
    for number, _, piece in segments:
        rounds, damaged, left_here = _read_segment(piece, run.names)
        parts.append(rounds)
        left = left_here or left
        if damaged:
            run.complaints.append(
                f"{path.name}: {damaged} entries of segment {number} are damaged, and left out"
            )
    first, facts, _ = segments[0]
    try:
        rank, world_size = int(facts["rank"]), int(facts["world_size"])
        host, clock = str(facts["host"]), str(facts["clock"])
        wall, monotonic = int(facts["wall"]), int(facts["monotonic"])
    except (KeyError, TypeError, ValueError) as error:
        run.complaints.append(f"{path.name} is of another version: {error!r}")
        return None
    rounds = _unique_rounds(np.concatenate(parts))
    return RankTrace(
        rank, world_size, host, clock, wall, monotonic, rounds, left, dropped=first > 0
    )


def _read_segment(
    data: bytes, names: NameTable
) -> tuple[NDArray[Any], int, tuple[int, str] | None]:
    """Return the rounds, the number of damaged entries, and when and how the rank left."""
    count = (len(data) - trace_file.START) // _ENTRY.itemsize
    entries = np.frombuffer(data, _ENTRY, count, trace_file.START)
    pieces: dict[int, bytes] = {}
    for entry in entries[entries["kind"] == TEXT]:
        number = int(entry["label"])
        pieces[number] = pieces.get(number, b"") + entry.tobytes()[: int(entry["flags"])]
    texts = {number: text.decode("utf-8", "replace") for number, text in pieces.items()}
    left: tuple[int, str] | None = None
    for last in entries[entries["kind"] == LEFT]:
        left = int(last["posted"]), texts.get(int(last["outcome"]), "")
    found = entries[np.isin(entries["kind"], (ROUND, WAITING, POSTED, RESULT))]
    rounds = np.zeros(len(found), ROUNDS)
    for name in (*_WORDS, "kind"):
        rounds[name] = found[name]
    rounds["further"] = found["flags"] & 1
    for code in np.unique(found["outcome"]):
        text = texts.get(int(code), "")
        rounds["outcome"][found["outcome"] == code] = names.number("outcome", text)
    rounds["call"] = -1
    for code in np.unique(found["label"]):
        try:
            group, kind, name, src, op, site = json.loads(texts[int(code)])
            members = tuple(parse_ranks(texts[group].partition(" ")[0]))
            call = TracedCall(str(kind), name, src, op, str(site))
        except (KeyError, ValueError, TypeError):
            continue
        chosen = found["label"] == code
        rounds["call"][chosen] = names.number("call", call)
        rounds["group"][chosen] = names.number("group", members, texts[group])
    over = (rounds["kind"] == ROUND) | (rounds["kind"] == RESULT) | (rounds["done"] > 0)
    ordered = (rounds["posted"] <= rounds["since"]) & (rounds["since"] <= rounds["done"])
    sound = (rounds["posted"] >= 0) & (rounds["number"] >= 0) & (rounds["call"] >= 0)
    sound &= ordered | ~over
    damaged = int((entries["kind"] > LEFT).sum()) + int((~sound).sum())
    return rounds[sound], damaged, left


def _unique_rounds(rounds: NDArray[Any]) -> NDArray[Any]:
    """Return each round once: finished rather than waiting, and with its result."""
    alone: NDArray[Any] = rounds[rounds["number"] == 0]
    rounds = rounds[rounds["number"] > 0]
    if not len(rounds):
        return alone
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
    return np.concatenate([alone, rounds[keep]])
