"""JSON that proves itself whole: its first field is a digest of all the rest.

The digest is XXH3-128 over the exact bytes with zeros in its own place. It tells damage, not
malice: whoever can write the file can also make a new digest.
"""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import json
from typing import Any

import xxhash

from syncprims.errors import CheckpointError

from .refusal import refusal

SEAL = "syncprims.seal"
LENGTH = 32  #: hexadecimal digits
BLANK = "0" * LENGTH


def digest(data: bytes | memoryview) -> str:
    """Return the digest of some bytes, as text."""
    return xxhash.xxh3_128_hexdigest(data)


def sealed(document: dict[str, Any], under: str | None = None) -> tuple[bytes, str]:
    """Return `document` as JSON with its seal, and the seal.

    The seal is the first field; with `under`, the first field of that first field.
    """
    if under is None:
        whole = {SEAL: BLANK, **document}
    else:
        inner = {SEAL: BLANK, **document[under]}
        whole = {under: inner, **{k: v for k, v in document.items() if k != under}}
    text = json.dumps(whole, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Names of files may hold what is no valid UTF-8; it must come back the same.
    return reseal(text.encode("utf-8", "surrogatepass"), under)


def reseal(data: bytes, under: str | None = None) -> tuple[bytes, str]:
    """Return sealed JSON, of which something has been changed, with a new seal, and that."""
    start = len(_prefix(under))
    blank = data[:start] + BLANK.encode() + data[start + LENGTH :]
    seal = digest(blank)
    return data[:start] + seal.encode() + data[start + LENGTH :], seal


def is_ours(data: bytes, *marks: str) -> bool:
    """Tell whether some JSON has a seal, or had one before it was damaged.

    `marks` are other keys that only we write: one changed bit cannot hide all of them.
    """
    return any(mark.encode() in data for mark in (SEAL, *marks))


def check(path: str, data: bytes, under: str | None = None) -> str:
    """Return the seal of sealed JSON.

    :raises CheckpointError: if it has none, or another than its bytes have.
    """
    prefix = _prefix(under)
    if not data.startswith(prefix):
        raise refusal(path, "its seal is not in its place", prefix, data[: len(prefix)])
    found = data[len(prefix) : len(prefix) + LENGTH]
    expected = reseal(data, under)[1]
    if found != expected.encode():
        raise refusal(path, "damaged", f"the seal {expected} of its bytes", f"the seal {found!r}")
    return expected


def _prefix(under: str | None) -> bytes:
    begin = "{" if under is None else f'{{"{under}":{{'
    return f'{begin}"{SEAL}":"'.encode()


def parse(path: str, data: bytes) -> dict[str, Any]:
    """Return the object in some JSON, taking nothing that two readers could understand differently.

    :raises CheckpointError: if it is not JSON, has a key twice, NaN, or nests too deep.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = ""
            for key, _ in pairs:
                twice = key if key in seen else twice
                seen.add(key)
            raise refusal(path, "ambiguous", "each key once", f"{twice!r} twice")
        return made

    def no_constant(name: str) -> Any:
        raise refusal(path, "not JSON", "a number", name)

    try:
        found = json.loads(data, object_pairs_hook=once, parse_constant=no_constant)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise refusal(path, "not JSON", "a JSON object", str(error)) from None
    if not isinstance(found, dict):
        raise refusal(path, "not what was written", "a JSON object", f"a {type(found).__name__}")
    return found
