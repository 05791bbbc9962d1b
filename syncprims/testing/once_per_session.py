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


class SessionValues:
    """The values that the workers of one test session share, in a directory."""

    def __init__(self, find_folder: Callable[[], Path], worker: str) -> None:
        self._find_folder = find_folder
        self._worker = worker
        self._values: dict[str, Any] = {}  # that this worker has made or read
        self._presence: IO[bytes] | None = None  # a file, locked while this worker runs

    @functools.cached_property
    def _folder(self) -> Path:
        folder = self._find_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def join(self) -> None:
        """Be one of the workers, from now on."""
        if self._presence is None:
            self._presence = self._locked("workers", fcntl.LOCK_SH)

    def get(self, name: str, make: Callable[[], T], cleanup: Callable[[T], object] | None) -> T:
        """Return the value of this name; make it if no worker has."""
        if name not in self._values:
            self.join()
            digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
            path = self._folder / f"{digest}{_VALUE}"
            with self._locked(f"making-{digest}", fcntl.LOCK_EX):
                if not path.exists():
                    self._make(path, make, cleanup)
                entry, maker = pickle.loads(path.read_bytes())
            if not isinstance(entry, bytes):
                error = entry.unpack()
                error.add_note(f"made once per session, {name!r} failed in worker {maker}")
                raise error
            self._values[name] = pickle.loads(entry)[0]
        value: T = self._values[name]
        return value

    def _make(
        self, path: Path, make: Callable[[], T], cleanup: Callable[[T], object] | None
    ) -> None:
        try:
            entry = pickle.dumps((make(), cleanup))
        except (KeyboardInterrupt, SystemExit):
            raise  # of this worker only
        except BaseException as error:
            self._write(path, pack_exception(error))
            raise
        self._write(path, entry)

    def _write(self, path: Path, entry: Any) -> None:
        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps((entry, self._worker)))
        new.rename(path)

    def leave(self) -> None:
        """End as one of the workers; the last one cleans up all values."""
        if self._presence is None:
            return
        with self._presence as file:
            self._presence = None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # other workers are there
            for path in self._folder.glob(f"*{_VALUE}"):
                entry, _ = pickle.loads(path.read_bytes())
                path.unlink()
                if isinstance(entry, bytes):
                    value, cleanup = pickle.loads(entry)
                    if cleanup is not None:
                        cleanup(value)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _locked(self, name: str, how: int) -> IO[bytes]:
        """Return a file that is locked until it is closed."""
        file = (self._folder / name).open("wb")
        fcntl.flock(file, how)
        return file


current_session: ContextVar[SessionValues | None] = ContextVar("syncprims_session", default=None)


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
        return session.get(name, fn, cleanup)

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
