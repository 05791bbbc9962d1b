"""What a call returns: a new value, or the caller's own array `out`, filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays import is_array, is_tensor
from .reduction import describe

if TYPE_CHECKING:
    from syncprims._protocol.rounds import Rounds


def copy_into(rounds: Rounds, out: Any, value: Any) -> Any:
    """Return `out`, now holding `value`; or `value`, if `out` is None or has been filled.

    That `out` does not fit is this rank's own error: the call itself has succeeded.

    :raises TypeError, ValueError: if `out` cannot hold it.
    """
    if out is None or out is value:
        return value
    error = _why_not_into(out, value)
    if error is not None:
        rounds.in_step = error
        raise error
    if is_array(out):
        out[...] = value
    else:
        out.detach().copy_(value)
    return out


def _why_not_into(out: Any, value: Any) -> TypeError | ValueError | None:
    """Return the error of an `out` that cannot hold `value`, or None if it can.

    A TypeError, if `out` is neither a numpy array nor a tensor. A ValueError, if its shape or dtype
    differs, it is read-only, or items of it share memory.
    """
    if not (is_array(out) or is_tensor(out)):
        kind = type(out).__name__
        return TypeError(f"out is a {kind}; it takes a numpy array or a torch tensor")
    if not (is_array(value) or is_tensor(value)):
        return TypeError(f"out was given, and what arrived is a {type(value).__name__}, no array")
    alike = is_array(out) == is_array(value)
    same = out.dtype == value.dtype if alike else str(out.dtype) == str(value.dtype)
    if not same or tuple(out.shape) != tuple(value.shape):
        return ValueError(f"out is {_with_article(out)}; what arrived is {_with_article(value)}")
    if is_array(out):
        if not out.flags.writeable:
            return ValueError("out is read-only; give an array that can be written to")
    elif str(out.layout) == "torch.strided" and any(
        step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)
    ):
        return ValueError("items of out share memory; give a tensor that is not expanded")
    return None


def _with_article(value: Any) -> str:
    text = describe(value)
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"
