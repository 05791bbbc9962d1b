"""Corrupted checkpoints are refused with one class of error that names the file."""

from __future__ import annotations

import random
import resource
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checkpoint_worlds import Kept
from support.file_faults import watched
from support.malformed_checkpoints import malform
from support.rank_worlds import Kind, Ranks
from torch import nn

import syncprims as sp
from syncprims.training import load_checkpoint_in_model, load_state, save_model, save_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoint_worlds import Alone

SOAK = 100_000
SHORT = 5_000
PART = 250


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, dtype=torch.float64))


def objects() -> dict[str, Any]:
    return {"model": tiny(), "note": Kept({"a": [1, 2.5, None], "b": {"c": (1, 2)}})}


def load_weights(path: str) -> None:
    load_checkpoint_in_model(TARGET["model"], path)


TARGET = objects()
WAYS: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "single": (lambda path: save_model(tiny(), path), load_weights),
    "shards": (lambda path: save_model(tiny(), path, max_shard_size=30), load_weights),
    "state": (
        lambda path: save_state(path, objects(), step=3, rng=False),
        lambda path: load_state(path, TARGET, rng=False),
    ),
}
each_way = pytest.mark.parametrize("way", WAYS)


def refused(load: Callable[[str], object], folder: Path, name: str) -> bool:
    """Return whether it is refused with an error that names the file."""
    try:
        load(str(folder))
    except sp.CheckpointError as error:
        return name in str(error) and "expected" in str(error) and "found" in str(error)
    return False


def break_everywhere(
    way: str, folder: Path, lengths: slice, bits: range | None
) -> tuple[int, list[Any]]:
    """Cut a checkpoint's files everywhere, flip their bits; return how many times, and what passed.

    With `bits`, those of every byte are flipped, else one that moves on from byte to byte.
    """
    save, load = WAYS[way]
    save(str(folder))
    load(str(folder))
    tried, passed = 0, list[Any]()

    def attempt(path: Path, data: bytes, what: str, where: int) -> None:
        nonlocal tried
        path.write_bytes(data)
        tried += 1
        if not refused(load, folder, path.name):
            passed.append((path.name, what, where))

    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for length in range(len(whole))[lengths]:
            attempt(path, whole[:length], "cut", length)
        for byte in range(len(whole)):
            for bit in bits or [byte % 8]:
                data = bytearray(whole)
                data[byte] ^= 1 << bit
                attempt(path, bytes(data), "bit", 8 * byte + bit)
        path.write_bytes(whole)
    load(str(folder))
    return tried, passed


@pytest.mark.parametrize(
    "bit", [None, *(pytest.param(n, marks=pytest.mark.soak) for n in range(8))]
)
@each_way
def test_flipped_bits_and_truncations_are_refused(
    way: str, bit: int | None, tmp_path: Path, meeting_place: Path
) -> None:
    ranks = Ranks(Kind("single", 1), meeting_place, patience=600)
    lengths, bits = slice(None, None, 3), None
    if bit is not None:  # an eighth of all flips and lengths
        lengths, bits = slice(bit, None, 8), range(bit, bit + 1)
    [(tried, passed)] = ranks.run(lambda: break_everywhere(way, tmp_path / "it", lengths, bits))
    assert tried > 500
    assert not passed
    print(f"corruption: {way}, bit {bit}: {tried} flips and truncations, all refused")


def try_malformed(way: str, count: int, folder: Path, seed: int) -> tuple[int, int]:
    """Load malformed checkpoints; return how many were refused, and how many did no harm."""
    save, load = WAYS[way]
    good, bad = folder / "good", folder / "bad"
    save(str(good))
    outside: list[str] = []

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "open" and not str(args[0]).startswith(str(bad)):
            outside.append(str(args[0]))

    refused_, harmless = 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        dice = random.Random(f"{seed} {way} {number}")
        shutil.copytree(good, bad)
        malform(bad, dice)
        begin, wrong = time.process_time(), None
        with watched(at):
            try:
                load(str(bad))
                harmless += 1
            except sp.CheckpointError as error:
                said = str(error)
                kinds = {failure.type for failure in error.failures.values()}
                refused_ += 1
                wrong = str(bad) not in said or kinds - {"syncprims.CheckpointError"}
            except BaseException as error:
                error.add_note(f"malformed checkpoint {number}, way {way}, seed {seed}")
                raise
        assert not wrong, (number, wrong)  # nothing else stands behind it
        assert time.process_time() - begin < 1, number
        shutil.rmtree(bad)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert not outside
    assert grown < 64 << 10, f"{grown} KiB more memory"
    return refused_, harmless


@pytest.mark.parametrize("count", [SHORT, pytest.param(SOAK, marks=pytest.mark.soak)])
@each_way
def test_malformed_checkpoints_are_refused_and_do_no_harm(
    way: str, count: int, tmp_path: Path, alone: Alone
) -> None:
    """Each process tries a part of them, and must end within a minute."""
    each = count // len(WAYS) + 1 if count == SHORT else PART
    parts = 1 if count == SHORT else count // len(WAYS) // PART + 1
    seed = 20261121 if count == SHORT else random.SystemRandom().randrange(1 << 32)
    bad = harmless = 0
    for part in range(parts):
        (tmp_path / str(part)).mkdir()
        refused_, fine = alone(partial(try_malformed, way, each, tmp_path / str(part), seed + part))
        bad, harmless = bad + refused_, harmless + fine
    assert bad > parts * each * 0.9
    print(f"malformed: {way}: {bad} refused, {harmless} harmless, seed {seed}")
