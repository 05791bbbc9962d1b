"""Exceptions sent from one process to another, also those that cannot be pickled."""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from typing import Any, NamedTuple


class RemoteError(Exception):
    """Stands for an exception whose type is unknown in this process."""


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class PackedException(NamedTuple):
    """An exception as plain data."""

    module: str  #: of its type
    name: str  #: of its type, qualified
    text: str
    pickled: bytes  #: empty if it does not survive pickling
    traceback: str
    members: tuple[PackedException, ...] = ()  #: of a group that does not survive pickling

    def unpack(self) -> BaseException:
        """Return an exception of equal type and text; its cause shows the original traceback."""
        error = pickle.loads(self.pickled) if self.pickled else self._rebuild()
        assert isinstance(error, BaseException)
        error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def _rebuild(self) -> BaseException:
        """Return an exception of this type and text without calling its constructor."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            found = getattr(found, part, None)
        if found is None and self.module == "builtins":  # pytest's outcomes name this module
            found = getattr(sys.modules.get("_pytest.outcomes"), self.name, None)
            if found is not None:
                return found(self.text)  # type: ignore[no-any-return]
        if isinstance(found, type) and issubclass(found, BaseExceptionGroup) and self.members:
            with contextlib.suppress(Exception):
                return found(self.text, [one.unpack() for one in self.members])
        if isinstance(found, type) and issubclass(found, BaseException):
            with contextlib.suppress(Exception):
                error = found.__new__(found)
                error.args = (self.text,)
                if str(error) == self.text:
                    return error
        return RemoteError(f"{self.module}.{self.name}: {self.text}")


def pack_exception(error: BaseException) -> PackedException:
    """Return `error` as plain data; :meth:`PackedException.unpack` restores it."""
    kind = type(error)
    pickled = b""
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is kind:
            pickled = data
    trace = "".join(traceback.format_exception(error))
    text = text_of(error)
    members: tuple[PackedException, ...] = ()
    if isinstance(error, BaseExceptionGroup) and not pickled:
        text, members = error.message, tuple(map(pack_exception, error.exceptions))
    return PackedException(kind.__module__, kind.__qualname__, text, pickled, trace, members)


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or "" if that raises: a user's code must not hide the failure."""
    try:
        return str(error)
    except Exception:
        return ""
