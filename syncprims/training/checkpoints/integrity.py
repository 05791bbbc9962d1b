"""Digests, JSON that carries its own, and the errors for files that were changed.

A document or file with a digest has it in the field :data:`SEAL`. The digest is XXH3-128 over the
exact bytes, with zeros in the place of the digest itself. It finds damage and not malice: anyone
who can write the file can also write a new digest.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Generator
from typing import Any

import xxhash

from syncprims import CheckpointError

from . import filesystem

SEAL = "syncprims.seal"  #: the field with the digest
BLANK = "0" * 32  #: in the digest's place while it is computed
_FIELD = f'"{SEAL}":"'.encode()


# -- errors ---------------------------------------------------------------------------------------


def refusal(path: str, what: str, expected: object, found: object) -> CheckpointError:
    """Return the error for a file that was changed after it was written."""
    what = f"{path}: {what}: expected {_shorten(expected)}, found {_shorten(found)}"
    cure = "Load another checkpoint, or fetch this one again; if a program saves there, load again."
    return CheckpointError(f"{what}. {cure}", path=path)


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-60:]}"


@contextlib.contextmanager
def reading(path: str, kind: str = "a regular file") -> Generator[None]:
    """Turn an OSError about `path` into a refusal."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise refusal(path, "missing", "a file", "none") from error
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        found = "a symbolic link, which may lead anywhere" if is_link else error.strerror
        refused = refusal(path, "cannot be read", kind, found or str(error))
        refused.errno = error.errno
        raise refused from error


def check_file_name(path: str, name: object) -> str:
    """Return a file's name that was read from the file `path`.

    :raises CheckpointError: if it could lead out of the directory.
    """
    if (
        not isinstance(name, str)
        or not filesystem.is_possible(name)
        or name in ("", ".", "..")
        or any(c in name for c in "/\\")
    ):
        raise refusal(path, "a file's name", "a name in the same directory", repr(name))
    return name


# -- digests --------------------------------------------------------------------------------------


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


# -- JSON with a digest ---------------------------------------------------------------------------


def dump(document: dict[str, Any]) -> bytes:
    """Return `document` as JSON. The field for its digest comes before everything from users."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Names of files may not be valid UTF-8; they must come back the same.
    return text.encode("utf-8", "surrogatepass")


def put_seal(data: bytes, found: str = "") -> bytes:
    """Return JSON with a digest in its field: by default the one of these bytes."""
    return data.replace(_FIELD + BLANK.encode(), _FIELD + (found or digest(data)).encode(), 1)


def take_seal(data: bytes) -> tuple[bytes, str]:
    """Return JSON without the digest in its field, and the digest; "" if it has no such field."""
    begin, field, rest = data.partition(_FIELD)
    found, end = rest[: len(BLANK)], rest[len(BLANK) :]
    blank = BLANK.encode() if field else b""
    return begin + field + blank + end, found.decode(errors="replace")


def has_seal(data: bytes, mark: str) -> bool:
    """Return whether some JSON has a digest, or had one before it was damaged.

    `mark` is another key that only this library writes: one flipped bit cannot hide both.
    """
    return f'"{SEAL}"'.encode() in data or f'"{mark}"'.encode() in data


def check_seal(path: str, data: bytes) -> None:
    """Raise unless some JSON has the digest of its bytes.

    :raises CheckpointError: in that case.
    """
    bare, found = take_seal(data)
    expected = digest(bare)
    if found != expected:
        what = f"the digest {expected} of its bytes"
        raise refusal(path, "damaged", what, f"the digest {found!r}")


def parse(path: str, data: bytes) -> dict[str, Any]:
    """Return the object in some JSON. What two readers could understand differently is refused.

    :raises CheckpointError: if it is not JSON, has a key twice, NaN, or nests too deep.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError("a key twice")
        return fields

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name}, which is not a number")

    try:
        document = json.loads(data, object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise refusal(path, "not JSON", "a JSON object with each key once", str(error)) from None
    if not isinstance(document, dict):
        raise refusal(path, "not what was written", "a JSON object", f"a {type(document).__name__}")
    return document
