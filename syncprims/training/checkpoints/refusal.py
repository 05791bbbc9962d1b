"""How a checkpoint is refused: which file, what was expected, what was found, what to do."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from syncprims.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Generator

ADVICE = "Load another checkpoint, or fetch this one again."


def refusal(path: str, what: str, expected: object, found: object) -> CheckpointError:
    """Return the error for a file that is not what was written."""
    return CheckpointError(
        f"{path}: {what}: expected {_short(expected)}, found {_short(found)}. {ADVICE}", path=path
    )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-60:]}"


@contextlib.contextmanager
def reading(path: str) -> Generator[None]:
    """Turn what the system says about `path` into a refusal."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise refusal(path, "missing", "a file", "none") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the file is not to blame
            raise CheckpointError(
                f"{path}: cannot be opened: {error.strerror}. All files of a checkpoint are open "
                f"while it is loaded: allow more of them (ulimit -n), and load again.",
                path=path, errno=error.errno,
            ) from error  # fmt: skip
        found = error.strerror
        if error.errno == errno.ELOOP:
            found = "a symbolic link, which may lead anywhere"
        refused = refusal(path, "cannot be read", "a regular file", found or str(error))
        refused.errno = error.errno
        raise refused from error
