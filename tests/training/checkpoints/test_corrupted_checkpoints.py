"""Corrupted checkpoints are refused with one class of error that names the file."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from conftest import soak
from support.checkpoint_worlds import Alone, Kept
from support.file_faults import watched
from support.rank_worlds import Kind, Ranks
from torch import nn

import syncprims as sp
from syncprims.accelerate import Accelerator
from syncprims.training import load_checkpoint_in_model, load_state, save_model, save_state
from syncprims.training.checkpoints.integrity import BLANK, SEAL, dump, put_seal

#: Replacements for values in a JSON document.
STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 1.5, float("nan"), float("inf"), "", "..",
    "../secret", "/etc/passwd", "a/b", "a\0b", "a\\b", "model.safetensors", "checkpoint.json",
    "F32", "F4", "I64", "BOOL", [], {}, [[]], [0, 0], [2**62, 2**62], [0, 2**63], [-1, 4],
    [0] * 100, {"$": "tensor"}, {"$": "tensor", "key": "0.weight"}, {"$": "nothing"},
    {"$": "tensor", "key": "x", "shape": [2**40], "shards": []},
    {"$": "array", "key": "x", "dtype": "O"},
    {"$": "size", "is": ["x"]}, {"$": "dict", "items": [[{}, 1]]}, {"$": ["list"]},
    {"$": "dtype", "is": "load"}, {"$": "device", "is": "nowhere"}, {"$": "int", "is": "zz"},
    {"$": "array", "key": "x", "dtype": "<f8"}, {"$": "deque", "is": [[], -1]},
    {"$": "bytes_", "is": 2**40}, {"$": "bytearray", "is": 2**40}, {"$": "tuple", "is": 5},
]  # fmt: skip


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return all (container, key) pairs in a JSON document."""
    found: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        found += [(document, key) for key in document]
        for value in document.values():
            found += places(value)
    elif isinstance(document, list):
        found += [(document, index) for index in range(len(document))]
        for value in document:
            found += places(value)
    return found


def mutate(document: Any, dice: random.Random) -> None:
    """Change something in a JSON document."""
    found = places(document)
    if not found:  # the document is empty
        return
    container, key = dice.choice(found)
    deed = dice.randrange(4)
    if deed == 0:
        container[key] = copy.deepcopy(dice.choice(STRANGE))  # a later change may need it
    elif deed == 1:
        del container[key]
    elif deed == 2 and isinstance(container, dict):
        other = dice.choice(["x", "..", "__metadata__", "$", SEAL, ""])
        container[other] = container.pop(key)
    elif isinstance(container[key], int):
        container[key] += dice.choice([-8, -1, 1, 8, 2**32])
    else:
        other, where = dice.choice(found)
        container[key] = json.loads(
            json.dumps(other.get(where) if isinstance(other, dict) else other[-1:])
        )


def dumped(document: Any, under: str | None, dice: random.Random) -> bytes:
    """Return a document as JSON, mostly ready for a matching digest, as a forger would."""
    if dice.random() < 0.7:
        try:
            bare = json.loads(json.dumps(document))
            inner = bare if under is None else bare[under]
            if SEAL in inner:
                inner[SEAL] = BLANK
            return dump(bare)
        except (ValueError, TypeError, AttributeError, KeyError):
            pass
    data = json.dumps(document, separators=(",", ":")).encode()
    deed = dice.randrange(6)
    if deed == 0:
        data = data.replace(b"{", b'{"twice":1,"twice":2,', 1)
    elif deed == 1:
        data = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    elif deed == 2:
        data = data[: dice.randrange(len(data) + 1)]
    elif deed == 3:
        data = data.replace(b"}", b"\xff}", 1)
    elif deed == 4:
        data = data.replace(b":", b":" + b"9" * 5000 + b",", 1)
    return data


def forge_tensors(path: Path, dice: random.Random) -> None:
    """Return a changed safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    for _ in range(dice.randrange(1, 4)):
        mutate(header, dice)
    raw = dumped(header, "__metadata__", dice)
    said = len(raw) if dice.random() < 0.9 else dice.choice([0, 1, 2**20, 2**63, 2**64 - 1])
    if dice.random() < 0.2:
        body = body[: dice.randrange(len(body) + 1)] + bytes(dice.randrange(16))
    begin = struct.pack("<Q", said) + raw
    try:
        offsets = sorted(field["data_offsets"] for field in header.values() if "dtype" in field)
        parts = [begin, *(body[start:end] for start, end in offsets if start < end)]
    except (AttributeError, KeyError, TypeError, ValueError):  # not a header: it is never compared
        parts = [begin]
    digests = b"".join(xxhash.xxh3_128_digest(bytes(part)) for part in parts)
    path.write_bytes(put_seal(begin, xxhash.xxh3_128_hexdigest(digests)) + body)


def forge_json(path: Path, under: str | None, dice: random.Random) -> None:
    """Return a changed index or manifest."""
    document = json.loads(path.read_bytes())
    for _ in range(dice.randrange(1, 4)):
        mutate(document, dice)
    path.write_bytes(put_seal(dumped(document, under, dice)))


def damage(path: Path, dice: random.Random) -> None:
    """Change bytes of a file, or make it longer or shorter."""
    data = bytearray(path.read_bytes())
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(data))
        data[at] = dice.randrange(256)
    if dice.random() < 0.3:
        data = data[: dice.randrange(len(data))]
    path.write_bytes(data)


def plant(path: Path, dice: random.Random) -> None:
    """Replace a file by something else."""
    path.unlink()
    deed = dice.randrange(5)
    if deed == 0:
        path.symlink_to("/etc/passwd")
    elif deed == 1:
        path.symlink_to(path.name)
    elif deed == 2:
        os.mkfifo(path)
    elif deed == 3:
        path.mkdir()


def malform(folder: Path, dice: random.Random) -> None:
    """Damage one file of a checkpoint."""
    path = dice.choice(sorted(folder.iterdir()))
    ways: list[Callable[[], None]] = [lambda: damage(path, dice), lambda: plant(path, dice)]
    if path.suffix == ".json":
        under = "metadata" if path.name.endswith(".index.json") else None
        ways += [lambda: forge_json(path, under, dice)] * 8
    else:
        ways += [lambda: forge_tensors(path, dice)] * 5
    dice.choice(ways)()


SOAK = 100_000
SHORT = 2_500
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


@pytest.mark.parametrize("bit", [None, *map(soak, range(8))])
@each_way
def test_flips_and_cuts(way: str, bit: int | None, tmp_path: Path, meeting_place: Path) -> None:
    ranks = Ranks(Kind("single", 1), meeting_place, patience=600)
    lengths, bits = slice(None, None, 3), None
    if bit is not None:  # an eighth of all flips and lengths
        lengths, bits = slice(bit, None, 8), range(bit, bit + 1)
    [(tried, passed)] = ranks.run(lambda: break_everywhere(way, tmp_path / "it", lengths, bits))
    assert tried > 500
    assert not passed


def try_malformed(way: str, count: int, folder: Path, seed: int) -> int:
    """Load malformed checkpoints, and return how many were refused; the others do no harm."""
    save, load = WAYS[way]
    good, bad = folder / "good", folder / "bad"
    save(str(good))
    outside: list[str] = []

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "open" and not str(args[0]).startswith(str(bad)):
            outside.append(str(args[0]))

    refused_ = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        dice = random.Random(f"{seed} {way} {number}")
        shutil.copytree(good, bad)
        malform(bad, dice)
        begin, wrong = time.process_time(), None
        with watched(at):
            try:
                load(str(bad))
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
    return refused_


@pytest.mark.parametrize("count", [SHORT, soak(SOAK)])
@each_way
def test_malformed_files_do_no_harm(way: str, count: int, tmp_path: Path, alone: Alone) -> None:
    """Each process tries a part of them, and must end within a minute."""
    each = count // len(WAYS) + 1 if count == SHORT else PART
    parts = 1 if count == SHORT else count // len(WAYS) // PART + 1
    seed = 20261121 if count == SHORT else random.SystemRandom().randrange(1 << 32)
    bad = 0
    for part in range(parts):
        (tmp_path / str(part)).mkdir()
        bad += alone(partial(try_malformed, way, each, tmp_path / str(part), seed + part))
    assert bad > parts * each * 0.9, seed


def test_nothing_is_given_if_another_state_cannot_be_taken(tmp_path: Path, alone: Alone) -> None:
    """Each manifest has a right seal, and one state in it that its object would refuse."""

    def objects() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu")
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    def program() -> None:
        path = tmp_path / "checkpoint.json"
        save_state(tmp_path, objects())
        whole = json.loads(path.read_bytes())
        here = objects()
        before = {name: copy.deepcopy(thing.state_dict()) for name, thing in here.items()}
        generators = random.getstate()

        def refused(change: Callable[[Any], object]) -> None:
            document = copy.deepcopy(whole)
            change(document)
            path.write_bytes(put_seal(dump({**document, SEAL: BLANK})))
            with pytest.raises(sp.CheckpointError, match=r"expected .*, found "):
                load_state(tmp_path, here)
            for name, state in before.items():
                assert repr(here[name].state_dict()) == repr(state), name
            assert random.getstate() == generators

        def cpu(document: Any) -> Any:
            return document["ranks"][0][0]["random numbers"]["cpu"]["is"]

        refused(lambda document: cpu(document)[0]["is"][1]["is"].pop())
        refused(lambda document: cpu(document)[0]["is"].__setitem__(0, 99))
        refused(lambda document: cpu(document)[1].update(bit_generator="none"))
        refused(lambda document: cpu(document).__setitem__(2, None))
        refused(lambda document: document["objects"]["optimizer"][0]["param_groups"].pop())
        refused(lambda document: document["objects"]["schedule"].__setitem__(0, 5))
        refused(lambda document: document["objects"]["scaler"][0].pop("scale"))

    alone(program)


def test_impossible_paths_are_errors_of_the_library(tmp_path: Path, alone: Alone) -> None:
    """Whoever passes them, or has written them into an index."""

    def program() -> None:
        model, job = nn.Linear(2, 2), Accelerator(cpu=True)
        index = tmp_path / "model.safetensors.index.json"

        def load_by_index(name: str) -> None:
            index.write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
            load_checkpoint_in_model(model, tmp_path)

        calls: list[Callable[[str], object]] = [
            job.save_state, job.load_state, lambda path: job.save({}, path),
            lambda path: job.save_model(model, path), lambda path: save_model(model, path),
            lambda path: save_state(path, {}), lambda path: load_state(path, {}),
            lambda path: load_checkpoint_in_model(model, path), load_by_index,
        ]  # fmt: skip
        paths = ["/proc/nope/x", "/dev/null/x", "a\0b", "\ud800", f"{tmp_path}/{'n' * 300}"]
        for call, path in itertools.product(calls, paths):
            with pytest.raises(sp.SyncError):
                call(path)
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        for call in calls[:-1]:
            with pytest.raises(sp.SyncError):
                call("x")

    alone(program)
