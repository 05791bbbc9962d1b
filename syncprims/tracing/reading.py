"""Trace files as they are found: whole, cut off, damaged, or of something else."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from syncprims._protocol.trace_file import (
    ENTRY,
    HEADER,
    LEFT,
    MAGIC,
    POSTED,
    RESULT,
    ROUND,
    SEGMENT,
    START,
    TEXT,
    WAITING,
)
from syncprims.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_ENTRY = np.dtype(
    [
        ("posted", "<i8"),
        ("since", "<i8"),
        ("done", "<i8"),
        ("number", "<i8"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("outcome", "<u2"),
        ("label", "<u4"),
    ]
)
#: A round as the rest of this package sees it; times in ns, `done` 0 where it never was.
ROUNDS = np.dtype(
    [
        ("posted", "i8"),
        ("since", "i8"),
        ("done", "i8"),
        ("number", "i8"),
        ("group", "i4"),
        ("call", "i4"),
        ("outcome", "i4"),
        ("kind", "u1"),
        ("further", "?"),
    ]
)
assert _ENTRY.itemsize == ENTRY.size


class Call(NamedTuple):
    """What a rank came to a round for, and from where."""

    kind: str
    name: str | None
    src: int | None
    op: str | None
    site: str

    def __str__(self) -> str:
        text = self.kind if self.name is None else f"{self.kind} {self.name!r}"
        if self.op not in (None, "sum"):
            text += f" with op {self.op!r}"
        return text if self.src is None else f"{text} from rank {self.src}"


class Names:
    """Everything that rounds refer to by number, the same for all ranks."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.groups: list[tuple[int, ...]] = []
        self.outcomes: list[str] = [""]
        self._numbers: dict[tuple[str, Any], int] = {("outcome", ""): 0}

    def number(self, what: str, thing: Any) -> int:
        """Return the number of a call, group or outcome."""
        number = self._numbers.get((what, thing))
        if number is None:
            listed: list[Any] = getattr(self, f"{what}s")
            number = self._numbers[what, thing] = len(listed)
            listed.append(thing)
        return number


@dataclass
class RankTrace:
    """What one rank has recorded."""

    rank: int
    world_size: int
    host: str
    clock: str
    run: str
    wall: int  #: ns of the calendar, when its own clock said `monotonic`
    monotonic: int
    rounds: NDArray[Any]  #: of ROUNDS, by group and number
    left: tuple[int, str] | None = None  #: when it left the world, and with what error
    dropped: bool = False  #: its oldest rounds had to make room


@dataclass
class Run:
    """All that is known of one run."""

    name: str
    path: Path
    names: Names = field(default_factory=Names)
    ranks: list[RankTrace] = field(default_factory=list[RankTrace])
    complaints: list[str] = field(default_factory=list[str])

    @property
    def world_size(self) -> int:
        """How many ranks there were, recorded or not."""
        return max(rank.world_size for rank in self.ranks)

    @property
    def title(self) -> str:
        """What a reader calls it."""
        return f"Run {self.name}, {self.world_size} rank{'s' * (self.world_size > 1)}"


def find_runs(directory: Path) -> list[Path]:
    """Return the folders of all runs in `directory`, the latest last; also if it is one itself.

    :raises ConfigurationError: if there is none.
    """
    if not directory.is_dir():
        raise ConfigurationError(
            f"{directory} is no directory: name that which SYNCPRIMS_TRACE named in the run"
        )
    folders = [directory, *(path for path in directory.iterdir() if path.is_dir())]
    runs = [folder for folder in folders if any(folder.glob("rank-*.trace"))]
    if not runs:
        raise ConfigurationError(
            f"{directory} holds no trace: it is made by a run with SYNCPRIMS_TRACE={directory}"
        )
    return sorted(runs, key=lambda folder: (_began(folder), folder.name))


def _began(folder: Path) -> int:
    """Return when a run began, by the first rank whose file says so."""
    for path in sorted(folder.glob("rank-*.trace")):
        with path.open("rb") as file:
            found = _facts(file.read(START))
        if found is not None:
            return int(found[1].get("wall", 0))
    return 0


def read_run(folder: Path) -> Run:
    """Return what the ranks of a run have recorded; what cannot be read is complained of.

    :raises ConfigurationError: if nothing can.
    """
    run = Run(folder.name, folder)
    paths = list(folder.glob("rank-*.trace"))
    for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
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
            f"and who waited for them is laid on others"
        )
    return run


def _facts(data: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the number and the facts of the segment that begins with `data`; None if damaged."""
    if len(data) < START or data[:8] != MAGIC:
        return None
    _, number, length, check = HEADER.unpack_from(data)
    text = data[HEADER.size : HEADER.size + length]
    if len(text) != length or zlib.crc32(text, number & 0xFFFFFFFF) != check:
        return None
    try:
        facts = json.loads(text)
    except ValueError:
        return None
    if not isinstance(facts, dict):
        return None
    known = cast("dict[str, Any]", facts)
    return number, known


def _read_file(path: Path, run: Run) -> RankTrace | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        run.complaints.append(f"{path.name} cannot be read: {error}")
        return None
    segments: list[tuple[int, dict[str, Any], bytes]] = []
    for at in range(0, len(data), SEGMENT):
        piece = data[at : at + SEGMENT]
        found = _facts(piece)
        if found is not None:
            segments.append((*found, piece))
        elif piece.strip(b"\0"):
            what = f"bytes {at} to {at + len(piece)} are damaged or of something else"
            run.complaints.append(f"{path.name}: {what}, and left out")
    if not segments:
        run.complaints.append(f"{path.name} is no trace, or was cut off before the first round")
        return None
    segments.sort(key=lambda segment: segment[0])
    parts: list[NDArray[Any]] = []
    left: tuple[int, str] | None = None
    for number, _, piece in segments:
        reader = _Segment(piece, run.names)
        parts.append(reader.rounds())
        left = reader.left or left
        if reader.damaged:
            run.complaints.append(
                f"{path.name}: {reader.damaged} entries of segment {number} are damaged, and left "
                f"out"
            )
    facts = segments[0][1]
    try:
        return RankTrace(
            rank=int(facts["rank"]),
            world_size=int(facts["world_size"]),
            host=str(facts["host"]),
            clock=str(facts["clock"]),
            run=str(facts["run"]),
            wall=int(facts["wall"]),
            monotonic=int(facts["monotonic"]),
            rounds=_settled(np.concatenate(parts)),
            left=left,
            dropped=segments[0][0] > 0,
        )
    except (KeyError, TypeError, ValueError) as error:
        run.complaints.append(f"{path.name} is not of this version: {error!r}")
        return None


class _Segment:
    """The entries of one segment."""

    def __init__(self, data: bytes, names: Names) -> None:
        count = (len(data) - START) // ENTRY.size
        self._entries = np.frombuffer(data, _ENTRY, count, START)
        self._names = names
        self.damaged = int((self._entries["kind"] > LEFT).sum())
        self.left: tuple[int, str] | None = None
        self._texts = self._read_texts()

    def _read_texts(self) -> dict[int, str]:
        pieces: dict[int, bytes] = {}
        for entry in self._entries[self._entries["kind"] == TEXT]:
            piece = entry.tobytes()[: int(entry["flags"])]
            number = int(entry["label"])
            pieces[number] = pieces.get(number, b"") + piece
        return {n: text.decode("utf-8", "replace") for n, text in pieces.items()}

    def rounds(self) -> NDArray[Any]:
        """Return the rounds among the entries, as ROUNDS."""
        entries = self._entries
        for last in entries[entries["kind"] == LEFT]:
            outcome = self._texts.get(int(last["outcome"]), "")
            self.left = int(last["posted"]), outcome
        found = entries[np.isin(entries["kind"], (ROUND, WAITING, POSTED, RESULT))]
        over = (found["kind"] == ROUND) | (found["kind"] == RESULT)
        ordered = (found["posted"] <= found["since"]) & (found["since"] <= found["done"])
        sound = (found["posted"] >= 0) & (found["number"] >= 0) & (ordered | ~over)
        calls, groups = self._labels(found["label"])
        sound &= calls >= 0
        self.damaged += int((~sound).sum())
        rounds = np.zeros(len(found), ROUNDS)
        for name in ("posted", "since", "done", "number", "kind"):
            rounds[name] = found[name]
        rounds["call"], rounds["group"] = calls, groups
        rounds["further"] = found["flags"] & 1
        for code in np.unique(found["outcome"]):
            text = self._texts.get(int(code), "")
            rounds["outcome"][found["outcome"] == code] = self._names.number("outcome", text)
        sound_ones: NDArray[Any] = rounds[sound]
        return sound_ones

    def _labels(self, codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the numbers of calls and groups; -1 for what has no sound text."""
        calls, groups = np.full(len(codes), -1), np.full(len(codes), -1)
        for code in np.unique(codes):
            try:
                group, kind, name, src, op, site = json.loads(self._texts[int(code)])
                members = _members(self._texts[group])
                call = Call(str(kind), name, src, op, str(site))
            except (KeyError, ValueError, TypeError):
                continue
            chosen = codes == code
            calls[chosen] = self._names.number("call", call)
            groups[chosen] = self._names.number("group", members)
        return calls, groups


def _members(text: str) -> tuple[int, ...]:
    """Return the ranks in ``0-3,8``."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)


def _settled(rounds: NDArray[Any]) -> NDArray[Any]:
    """Return each round once: over rather than waited for, and with what came of it."""
    rank = np.zeros(16, "i4")
    rank[[POSTED, WAITING, ROUND, RESULT]] = 0, 1, 2, 3
    order = np.lexsort((rank[rounds["kind"]], rounds["number"], rounds["group"]))
    alone: NDArray[Any] = rounds[rounds["number"] == 0]
    rounds = rounds[order]
    rounds = rounds[rounds["number"] > 0]
    if not len(rounds):
        return alone
    result = np.flatnonzero(rounds["kind"][1:] == RESULT) + 1
    same = (rounds["number"][1:] == rounds["number"][:-1]) & (
        rounds["group"][1:] == rounds["group"][:-1]
    )
    told = result[same[result - 1]]
    rounds["outcome"][told - 1] = rounds["outcome"][told]
    keep = np.append(~same, True)  # the last of each round...
    keep[told] = False  # ... but for what only says what came of it
    keep[told - 1] = True
    keep[rounds["kind"] == RESULT] = False
    return np.concatenate([alone, rounds[keep]])


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as ``0-3, 8``."""
    from syncprims.errors import format_ranks

    chosen = sorted(ranks)
    return format_ranks(chosen).replace(",", ", ") if chosen else "none"
