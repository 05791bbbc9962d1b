"""Payloads between ranks: whole or not there yet, and never one in place of another."""

from __future__ import annotations

import resource
import time
import zlib
from pathlib import Path

import pytest
from support.rank_worlds import Kind, Ranks

import syncprims as sp

# The world of a rank, whose boards no public call posts several rounds to.
from syncprims._world.runtime import get_world
from syncprims.interface import Label, Note

PAYLOAD = b"a payload that no other file holds"


def test_a_torn_payload_is_not_there_yet(meeting_place: Path) -> None:
    """A rank that has written a part of it, as another processor may see it."""

    def program() -> None:
        if sp.get_rank() == 0:
            assert sp.all_gather(PAYLOAD) == [PAYLOAD, 1]
            return
        file, at = find(PAYLOAD, meeting_place)
        with file.open("r+b") as board:
            board.seek(at)
            board.write(b"A")
        with pytest.raises((sp.SyncTimeout, sp.PeerLost)):
            sp.all_gather(1, timeout=0.2)

    Ranks(Kind("file", 2), meeting_place).run(program)


def find(content: bytes, under: Path) -> tuple[Path, int]:
    """Return the file that holds this, and where, once there is one."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for file in under.rglob("*"):
            at = file.read_bytes().find(content) if file.is_file() else -1
            if at >= 0:
                return file, at
        time.sleep(0.001)
    raise TimeoutError("no rank has posted it")


def test_payloads_with_equal_checksums_are_different(meeting_place: Path) -> None:
    one, other = b"plumless", b"buckeroo"
    assert zlib.crc32(one) == zlib.crc32(other)

    def program() -> None:
        for first, second in ((one, other), (other, one)):
            values = [first, second, first, second]
            assert sp.all_gather(values[sp.get_rank()]) == values

    Ranks(Kind("file", 4), meeting_place).run(program)


def test_a_large_payload_stays_until_the_last_rank_has_read_it(meeting_place: Path) -> None:
    """A rank that is behind has posted later rounds, and has not collected this one."""

    def program() -> None:
        board, rank = get_world().open_rounds([0, 1, 2], "beside").board, sp.get_rank()
        payloads = [bytes([number]) * 10_000 for number in range(board.depth)]
        for payload in payloads:
            board.post(Note(Label("all_gather"), payload=payload))
        if rank == 2:
            sp.barrier("the others have read")
        for payload in payloads:
            notes = board.collect()
            assert notes is not None
            assert [note.payload for note in notes] == [payload] * 3
        if rank < 2:
            sp.barrier("the others have read")

    Ranks(Kind("file", 3), meeting_place).run(program)


def test_large_objects_need_no_space_of_their_size(meeting_place: Path) -> None:
    def program() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, hard))
        text = "x" * (12 << 20)
        assert sp.broadcast({"text": text} if sp.get_rank() == 1 else None, 1) == {"text": text}
        found = sp.all_gather([text, sp.get_rank()])
        assert found == [[text, 0], [text, 1]]

    Ranks(Kind("file", 2), meeting_place).run(program)
