"""Malformed checkpoints: damaged at random, or forged."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from typing import TYPE_CHECKING, Any

import xxhash

from syncprims.training.checkpoints.integrity import BLANK, SEAL, dump, put_seal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
