"""Checks of what users pass."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    from datetime import timedelta

#: What a user passes as a time.
Seconds: TypeAlias = "float | timedelta | None"


def require(value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Accept a `value` of this type.

    :raises TypeError: otherwise, beginning with `what`.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{what}, and {value!r} is a {type(value).__name__}")


def whole_number(value: SupportsIndex, what: str) -> int:
    """Return a whole number of any kind, numpy's too, as an int.

    :raises TypeError: if `value` is not a whole number; the message begins with `what`.
    """
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{what}, and {value!r} is a {type(value).__name__}") from None


def seconds(timeout: Any, name: str = "timeout") -> float | None:
    """Return a user's argument `name`, a number or a timedelta, in seconds.

    :raises TypeError: if it is neither.
    :raises ValueError: if it is not positive.
    """
    if timeout is None:
        return None
    number = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    if not hasattr(number, "__float__"):
        raise TypeError(f"{name}={timeout!r}: it takes seconds, or a timedelta")
    value = float(number)
    if not value > 0:
        raise ValueError(f"{name}={timeout!r}: it takes seconds above 0, or None for the default")
    return value


def plain_name(name: object) -> str:
    """Return a user's `name` as a plain str: a subclass, as an enum, may format it differently.

    :raises TypeError: if it is not a str.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: a name is a str")
    return str.__str__(name)


def check_name(name: str) -> None:
    """Accept a name that a label can hold.

    :raises ValueError: if it is too long, or holds a NUL.
    """
    if "\0" in name or len(name.encode("utf-8", "surrogatepass")) > 200:
        shown = repr(name) if len(name) <= 200 else f"{name[:40]!r} ... ({len(name)} characters)"
        raise ValueError(f"name={shown}: a name has at most 200 bytes of UTF-8, and no NUL")
