"""``once_per_session``: one worker of pytest-xdist makes a value, and all workers have it.

A value is a file that appears complete, by a rename, while its maker holds a lock of the kernel. A
maker that is killed leaves neither, and the next worker makes the value. A maker that raises leaves
its exception: no worker tries again, and all fail alike.

All workers share one more lock from the start to the end of the session. A worker that ends and can
have it alone is the last one, and cleans up.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import pickle
import shutil
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TypeVar

from syncprims.errors import ConfigurationError

from .errors import pack_exception

T = TypeVar("T")

_VALUE = ".value"  # how the names of value files end


def _lock(path: Path, how: int) -> IO[bytes]:
    """Return a file that is locked until it is closed."""
    file = path.open("wb")
    fcntl.flock(file, how)
    return file


class SessionValues:
    """The values that the workers of one test session share, in a directory."""

    def __init__(self, folder: Path, worker: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._worker = worker
        self._values: dict[str, Any] = {}  # that this worker has made or read
        self._presence = _lock(folder / "workers", fcntl.LOCK_SH)

    def get(self, name: str, make: Callable[[], T], cleanup: Callable[[T], object] | None) -> T:
        """Return the value of this name; make it if no worker has."""
        if name not in self._values:
            digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
            path = self._folder / f"{digest}{_VALUE}"
            with _lock(path.with_suffix(".lock"), fcntl.LOCK_EX):
                if not path.exists():
                    self._make(path, make, cleanup)
                value, _, error, maker = pickle.loads(path.read_bytes())
            if error is not None:
                raised = error.unpack()
                raised.add_note(f"made once per session, {name!r} failed in worker {maker}")
                raise raised
            self._values[name] = value
        result: T = self._values[name]
        return result

    def _make(
        self, path: Path, make: Callable[[], T], cleanup: Callable[[T], object] | None
    ) -> None:
        try:
            entry = pickle.dumps((make(), cleanup, None, self._worker))
        except (KeyboardInterrupt, SystemExit):
            raise  # of this worker only
        except BaseException as error:
            self._write(path, pickle.dumps((None, None, pack_exception(error), self._worker)))
            raise
        self._write(path, entry)

    def _write(self, path: Path, entry: bytes) -> None:
        new = path.with_suffix(".new")
        new.write_bytes(entry)
        new.rename(path)

    def leave(self) -> None:
        """End as one of the workers; the last one cleans up all values."""
        with self._presence as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # other workers are there
            for path in self._folder.glob(f"*{_VALUE}"):
                value, cleanup, *_ = pickle.loads(path.read_bytes())
                path.unlink()
                if cleanup is not None:
                    cleanup(value)
            shutil.rmtree(self._folder, ignore_errors=True)


#: Returns the values of the session that runs.
current_session: ContextVar[Callable[[], SessionValues] | None] = ContextVar(
    "syncprims_session", default=None
)


class OncePerSession:
    """Makes a value once for all workers of a test session."""

    def __call__(
        self, name: str, fn: Callable[[], T], *, cleanup: Callable[[T], object] | None = None
    ) -> T:
        """Return ``fn()``, called by one worker of this test session; others get an equal value.

        The others wait for it. If that worker is killed, another one calls `fn`; so does one that
        starts when all others have ended. If `fn` raises, all workers raise that exception. The
        value is pickled. Without pytest-xdist there is one worker.

        :param cleanup: called with the value by the last worker to end; a function at the top level
            of a module.
        :raises ConfigurationError: outside of a pytest session.
        """
        session = current_session.get()
        if session is None:
            raise ConfigurationError(
                f"once_per_session({name!r}) is for tests: there is no pytest session here, or its "
                f"plugin has been switched off with -p no:syncprims"
            )
        return session().get(name, fn, cleanup)

    def fixture(
        self, name: str, *, cleanup: Callable[[Any], object] | None = None
    ) -> Callable[[Callable[..., Any]], Any]:
        """Return a decorator that turns a function into a session fixture that one worker makes."""

        def decorate(fn: Callable[..., Any]) -> Any:
            import pytest

            @functools.wraps(fn)
            def made(*args: Any, **kwargs: Any) -> Any:
                return self(name, functools.partial(fn, *args, **kwargs), cleanup=cleanup)

            return pytest.fixture(scope="session")(made)

        return decorate


once_per_session = OncePerSession()
