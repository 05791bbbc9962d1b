"""A very small backend that keeps the contract: one file per note, one lock for all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from syncprims.interface import Backend, Board, Note, Settings, Status, Topology


class TinyBackend(Backend):
    name = "tiny"
    detects_death = True

    def __init__(self, topology: Topology, settings: Settings) -> None:
        super().__init__(topology, settings)
        self.root = Path(settings.directory or tempfile.gettempdir()) / f"tiny-{topology.run_id}"
        self.root.mkdir(parents=True, exist_ok=True)
        self.write("alive", str(os.getpid()).encode())

    def board(self, members: Sequence[int], name: str = "") -> TinyBoard:
        folder = self.root / "-".join([*map(str, members), name.encode().hex()])
        folder.mkdir(exist_ok=True)
        return TinyBoard(members, name, self.topology.rank, folder)

    def close(self, failure: bytes | None = None) -> None:
        self.write("left", failure or b"")

    def write(self, what: str, word: bytes) -> None:
        fresh = self.root / f"fresh-{self.topology.rank}"
        fresh.write_bytes(word)
        fresh.rename(self.root / f"{what}-{self.topology.rank}")  # whole, or not there


class TinyBoard(Board):
    def __init__(self, members: Sequence[int], name: str, rank: int, folder: Path) -> None:
        super().__init__(members, name)
        self.rank, self.folder = rank, folder

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def post(self, note: Note) -> None:
        self.posted += 1
        with self.locked():
            (self.folder / f"{self.posted}-{self.rank}").write_bytes(note.encode())

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        number = self.collected + 1
        deadline = self.now() + (3600 if timeout is None else timeout)
        while True:
            with self.locked():
                missing = self.missing(number)
                if self.verdict() is None and not missing:
                    self.collected = number
                    return [self.read(number, rank) for rank in self.members]
                gone = any(self.is_in_vain(rank, missing) for rank in self.members)
            if self.verdict() is not None or gone or self.now() >= deadline:
                return None
            time.sleep(0.0005)

    def is_in_vain(self, rank: int, missing: list[int]) -> bool:
        state = self.state(rank)[0]
        return state in ("lost", "failed") or (state == "finished" and rank in missing)

    def missing(self, number: int) -> list[int]:
        return [r for r in self.members if not (self.folder / f"{number}-{r}").exists()]

    def read(self, number: int, rank: int) -> Note:
        return Note.decode((self.folder / f"{number}-{rank}").read_bytes())

    def status(self, rank: int) -> Status:
        state, failure = self.state(rank)
        rounds = 0
        with self.locked():
            while (self.folder / f"{rounds + 1}-{rank}").exists():
                rounds += 1
            label = self.read(rounds, rank).label if rounds else None
        return Status(rounds, label, state, "", failure)  # type: ignore[arg-type]

    def state(self, rank: int) -> tuple[str, bytes]:
        try:
            pid = int((self.folder.parent / f"alive-{rank}").read_text())
        except FileNotFoundError:
            return "unknown", b""
        lives = False  # read first: then what it wrote before it ended is visible
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
            lives = stat.split()[0] not in "ZX"
        with contextlib.suppress(FileNotFoundError):
            failure = (self.folder.parent / f"left-{rank}").read_bytes()
            return ("failed", failure) if failure else ("finished", b"")
        return ("alive" if lives else "lost"), b""

    def abort(self, verdict: bytes) -> None:
        with self.locked():
            number = self.collected + 1
            path = self.folder / "verdict"
            if self.missing(number) and not path.exists():
                fresh = self.folder / "fresh-verdict"
                fresh.write_bytes(b"%d " % number + verdict)
                fresh.rename(path)

    def verdict(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            number, _, text = (self.folder / "verdict").read_bytes().partition(b" ")
            return text if int(number) <= self.collected + 1 else None
        return None
