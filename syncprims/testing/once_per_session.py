"""``once_per_session``: one worker of pytest-xdist makes a value, and all workers have it.

A value is a file that appears complete, by a rename, while its maker holds a lock of the kernel. A
maker that is killed leaves neither, and the next worker makes the value. A maker that raises leaves
its exception: no worker tries again, and all fail alike. Pytest removes the files with its other
temporary ones.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from syncprims._system.locks import locked
from syncprims.errors import ConfigurationError

from .errors import PackedException, pack_exception

T = TypeVar("T")

#: Returns where the values of the session that runs are.
session_folder: ContextVar[Callable[[], Path] | None] = ContextVar(
    "syncprims_session", default=None
)


def once_per_session(name: str, fn: Callable[[], T]) -> T:
    """Return ``fn()``, called by one worker of this test session; others get an equal value.

    The others wait for it. If that worker is killed, another one calls `fn`. If `fn` raises, all
    workers raise that exception. The value is pickled. Without pytest-xdist there is one worker.

    :raises ConfigurationError: outside of a pytest session.
    """
    find_folder = session_folder.get()
    if find_folder is None:
        raise ConfigurationError(
            f"once_per_session({name!r}) is for tests: there is no pytest session here, or its "
            f"plugin has been switched off with -p no:syncprims"
        )
    folder = find_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    with path.with_suffix(".lock").open("ab") as lock, locked(lock.fileno()):
        if not path.exists():
            new = path.with_suffix(".new")
            new.write_bytes(_make(fn))
            new.rename(path)
    value: T | PackedException = pickle.loads(path.read_bytes())
    if isinstance(value, PackedException):
        error = value.unpack()
        error.add_note(f"raised when {name!r} was made, once for all workers of the session")
        raise error
    return value


def _make(fn: Callable[[], object]) -> bytes:
    """Return the pickle of ``fn()``, or of what it raises."""
    try:
        return pickle.dumps(fn())
    except (KeyboardInterrupt, SystemExit):
        raise  # of this worker only
    except BaseException as error:
        return pickle.dumps(pack_exception(error))
