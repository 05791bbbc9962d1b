"""``once_per_session``: one worker of pytest-xdist makes it, all have it.

What was made stands in a file that appears whole, by a rename, while its maker holds a lock of the
kernel: a maker that is killed leaves neither, and the next worker makes it. A maker that raises
leaves its exception: nobody tries again what fails, and all fail alike.

Every worker holds a lock of its own from the session's start to its end. Whoever ends and finds no
other held is the last, and clears away.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import shutil
import traceback
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from syncprims.errors import ConfigurationError

from .errorbox import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

_POLL = 0.01  # seconds between two tries to get a lock
_ENTRY = ".made"


class Session:
    """What the workers of one test session share, in a directory of theirs."""

    def __init__(self, folder: Callable[[], Path], worker: str) -> None:
        self._find_folder = folder
        self._worker = worker
        self._values: dict[str, Any] = {}
        self._lock: Any = None

    @functools.cached_property
    def _folder(self) -> Path:
        folder = self._find_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def begin(self) -> None:
        """Be counted among the workers, from now to the end."""
        self._lock = self._locked(f"worker-{self._worker}")

    def get(self, name: str, fn: Callable[[], T], cleanup: Callable[[T], object] | None) -> T:
        """Return what was made under `name`, making it if nobody has."""
        if name in self._values:
            value: T = self._values[name]
            return value
        if self._lock is None:
            self.begin()
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        lock = self._locked(f"making-{digest}")
        try:
            path = self._folder / f"{digest}{_ENTRY}"
            made = path.exists()
            value = self._read(path, name) if made else self._make(path, name, fn, cleanup)
        finally:
            lock.release()
        self._values[name] = value
        return value

    def _make(
        self, path: Path, name: str, fn: Callable[[], T], cleanup: Callable[[T], object] | None
    ) -> T:
        try:
            value = fn()
            made = pickle.dumps((value, cleanup))
        except (KeyboardInterrupt, SystemExit):
            raise  # of this worker alone
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            self._write(path, {"error": pack(error), "text": text, "by": self._worker})
            raise
        self._write(path, {"made": made, "by": self._worker})
        return value

    def _write(self, path: Path, entry: dict[str, Any]) -> None:
        fresh = path.with_suffix(".fresh")
        with fresh.open("wb") as file:
            file.write(pickle.dumps(entry))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)

    def _read(self, path: Path, name: str) -> Any:
        entry = pickle.loads(path.read_bytes())
        error = unpack(entry.get("error"), entry.get("text", ""))
        if error is not None:
            error.add_note(f"made once per session, {name!r} failed in worker {entry['by']}")
            raise error
        return pickle.loads(entry["made"])[0]

    def end(self) -> None:
        """Be counted no more; the last one clears away what was made."""
        if self._lock is None:
            return
        leaving = self._locked("leaving")
        try:
            self._lock.release()
            self._lock = None
            if not self._others():
                self._clear()
        finally:
            leaving.release()
        if not self._folder.exists() or not any(self._folder.glob(f"*{_ENTRY}")):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _others(self) -> bool:
        """Tell whether any other worker holds its lock."""
        import filelock

        for path in self._folder.glob("worker-*"):
            lock = filelock.FileLock(path, timeout=0)
            try:
                lock.acquire()
            except filelock.Timeout:
                return True
            lock.release()
        return False

    def _clear(self) -> None:
        for path in self._folder.glob(f"*{_ENTRY}"):
            entry = pickle.loads(path.read_bytes())
            path.unlink()
            if "made" in entry:
                value, cleanup = pickle.loads(entry["made"])
                if cleanup is not None:
                    cleanup(value)

    def _locked(self, name: str) -> Any:
        import filelock  # slow to import, and few sessions ask for it

        lock = filelock.FileLock(self._folder / name, thread_local=False)
        lock.acquire(poll_interval=_POLL)
        return lock


session: ContextVar[Session | None] = ContextVar("syncprims_session", default=None)


class OncePerSession:
    """Makes something once for all workers of a test session."""

    def __call__(
        self, name: str, fn: Callable[[], T], *, cleanup: Callable[[T], object] | None = None
    ) -> T:
        """Return ``fn()``, called by one worker of this test session; the others have equal values.

        They wait for it meanwhile. If that worker is killed, another makes it; if `fn` raises, all
        raise that. The value is pickled. Without pytest-xdist there is one worker.

        :param cleanup: called with the value by the last worker to end; a function at the top level
            of a module.
        :raises ConfigurationError: outside of a pytest session.
        """
        here = session.get()
        if here is None:
            raise ConfigurationError(
                f"once_per_session({name!r}) is for tests: there is no pytest session here, or its "
                f"plugin has been switched off with -p no:syncprims"
            )
        return here.get(name, fn, cleanup)

    def fixture(
        self, name: str, *, cleanup: Callable[[Any], object] | None = None
    ) -> Callable[[Callable[..., Any]], Any]:
        """Return a decorator: the function becomes a session fixture that one worker makes."""

        def decorate(fn: Callable[..., Any]) -> Any:
            import pytest

            @functools.wraps(fn)
            def made(*args: Any, **kwargs: Any) -> Any:
                return self(name, functools.partial(fn, *args, **kwargs), cleanup=cleanup)

            return pytest.fixture(scope="session")(made)

        return decorate


once_per_session = OncePerSession()
