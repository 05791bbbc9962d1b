"""Exceptions on their way from one process to another, whether or not they pickle."""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import Any


class RemoteError(Exception):
    """An exception of a type that only its own process knew."""


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def pack(error: BaseException | None) -> Any:
    """Return what :func:`unpack` makes an equal error from, even if it does not pickle."""
    if error is None:
        return None
    kind = type(error)
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is kind:
            return data
    try:
        text = str(error)
    except Exception:  # a user's __str__ must not hide the failure
        text = ""
    return kind.__module__, kind.__qualname__, text


def unpack(packed: Any, traceback: str) -> BaseException | None:
    """Return the error that was packed, with the text of its traceback as its cause."""
    if packed is None:
        return None
    error = pickle.loads(packed) if isinstance(packed, bytes) else _rebuild(*packed)
    assert isinstance(error, BaseException)
    error.__cause__ = RemoteTraceback(traceback)
    return error


def _rebuild(module: str, name: str, text: str) -> BaseException:
    """Return an exception of that type and text, its constructor left out."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None and module == "builtins":  # where pytest says that its outcomes are
        found = getattr(sys.modules.get("_pytest.outcomes"), name, None)
        if found is not None:
            return found(text)  # type: ignore[no-any-return]
    if isinstance(found, type) and issubclass(found, BaseException):
        with contextlib.suppress(Exception):
            error = found.__new__(found)
            error.args = (text,)
            if str(error) == text:
                return error
    return RemoteError(f"{module}.{name}: {text}")
