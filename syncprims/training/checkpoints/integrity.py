"""Digests, JSON that carries its own, and the errors for files that are not what was written.

The digest in a JSON document is its first field: XXH3-128 over the exact bytes, with zeros in the
place of the digest itself. A digest finds damage and not malice: anyone who can write the file can
also write a new digest.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import xxhash

from syncprims.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Generator

DIGEST_KEY = "syncprims.seal"  #: of the digest in a JSON document
DIGEST_LENGTH = 32  #: hexadecimal digits
BLANK_DIGEST = "0" * DIGEST_LENGTH
CHUNK = 4 << 20  #: bytes that each digest in a chunked digest covers. Part of the format


# -- errors ---------------------------------------------------------------------------------------


def refusal(path: str, what: str, expected: object, found: object) -> CheckpointError:
    """Return the error for a file that is not what was written."""
    return CheckpointError(
        f"{path}: {what}: expected {_shorten(expected)}, found {_shorten(found)}. "
        f"Load another checkpoint, or fetch this one again.",
        path=path,
    )


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-60:]}"


@contextlib.contextmanager
def reading(path: str) -> Generator[None]:
    """Turn an OSError about `path` into a refusal."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise refusal(path, "missing", "a file", "none") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the file is not the cause
            raise CheckpointError(
                f"{path}: cannot be opened: {error.strerror}. All files of a checkpoint are open "
                f"while it is loaded: allow more of them (ulimit -n), and load again.",
                path=path, errno=error.errno,
            ) from error  # fmt: skip
        is_link = error.errno == errno.ELOOP
        found = "a symbolic link, which may lead anywhere" if is_link else error.strerror
        refused = refusal(path, "cannot be read", "a regular file", found or str(error))
        refused.errno = error.errno
        raise refused from error


def check_file_name(path: str, name: Any) -> str:
    """Return a file's name that was read from the file `path`.

    :raises CheckpointError: if it could lead out of the directory.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise refusal(path, "a file's name", "a name in the same directory", repr(name))
    return name


# -- digests --------------------------------------------------------------------------------------


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


class ChunkedDigest:
    """The digest of data that come in pieces: XXH3-128 of the digests of its chunks.

    A chunk is :data:`CHUNK` bytes; the last one may be shorter. So a reader can compute the
    digests of the chunks in parallel.
    """

    def __init__(self) -> None:
        self._total = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_128()
        self._left = CHUNK

    def update(self, data: memoryview) -> None:
        """Append some data."""
        while data:
            some, data = data[: self._left], data[self._left :]
            self._chunk.update(some)
            self._left -= len(some)
            if not self._left:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._total.update(self._chunk.digest())
        self._chunk.reset()
        self._left = CHUNK

    def hexdigest(self) -> str:
        """Return the digest. Nothing can be appended afterwards."""
        if self._left < CHUNK:
            self._end_chunk()
        return self._total.hexdigest()


# -- JSON with a digest ---------------------------------------------------------------------------


def dump_with_digest(document: dict[str, Any], under: str | None = None) -> tuple[bytes, str]:
    """Return `document` as JSON with its digest, and the digest.

    The digest is the first field; with `under`, the first field of that field, which comes first.
    """
    if under is None:
        complete = {DIGEST_KEY: BLANK_DIGEST, **document}
    else:
        inner = {DIGEST_KEY: BLANK_DIGEST, **document[under]}
        complete = {under: inner, **{k: v for k, v in document.items() if k != under}}
    text = json.dumps(complete, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Names of files may not be valid UTF-8; they must come back the same.
    return replace_digest(text.encode("utf-8", "surrogatepass"), under)


def replace_digest(data: bytes, under: str | None = None) -> tuple[bytes, str]:
    """Return JSON whose digest is brought up to date, and the digest."""
    start = len(_prefix(under))
    end = start + DIGEST_LENGTH
    found = digest(data[:start] + BLANK_DIGEST.encode() + data[end:])
    return data[:start] + found.encode() + data[end:], found


def has_digest(data: bytes, *marks: str) -> bool:
    """Return whether some JSON has a digest, or had one before it was damaged.

    `marks` are other keys that only this library writes: one flipped bit cannot hide all of them.
    """
    return any(mark.encode() in data for mark in (DIGEST_KEY, *marks))


def check_digest(path: str, data: bytes, under: str | None = None) -> str:
    """Return the digest in some JSON.

    :raises CheckpointError: if there is none, or it is not that of the bytes.
    """
    prefix = _prefix(under)
    if not data.startswith(prefix):
        raise refusal(path, "its digest is not where it belongs", prefix, data[: len(prefix)])
    found = data[len(prefix) : len(prefix) + DIGEST_LENGTH]
    expected = replace_digest(data, under)[1]
    if found != expected.encode():
        what = f"the digest {expected} of its bytes"
        raise refusal(path, "damaged", what, f"the digest {found!r}")
    return expected


def _prefix(under: str | None) -> bytes:
    begin = "{" if under is None else f'{{"{under}":{{'
    return f'{begin}"{DIGEST_KEY}":"'.encode()


def parse(path: str, data: bytes) -> dict[str, Any]:
    """Return the object in some JSON. What two readers could understand differently is refused.

    :raises CheckpointError: if it is not JSON, has a key twice, NaN, or nests too deep.
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise refusal(path, "ambiguous", "each key once", f"{twice!r} twice")
        return made

    def no_constant(name: str) -> Any:
        raise refusal(path, "not JSON", "a number", name)

    try:
        found = json.loads(data, object_pairs_hook=unique_keys, parse_constant=no_constant)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise refusal(path, "not JSON", "a JSON object", str(error)) from None
    if not isinstance(found, dict):
        raise refusal(path, "not what was written", "a JSON object", f"a {type(found).__name__}")
    return found
