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
    :raises RuntimeError: if torch cannot write it there, as into a sparse tensor.
    """
    if out is None or out is value:
        return value
    try:
        _check(out, value)
        if is_array(out):
            out[...] = value
        else:
            out.detach().copy_(value)
    except Exception as error:
        rounds.in_step = error
        raise
    return out


def _check(out: Any, value: Any) -> None:
    """Accept an `out` that can hold `value`.

    :raises TypeError: if `out` is neither a numpy array nor a tensor, or `value` is no array.
    :raises ValueError: if its shape or dtype differs, it is read-only, has no memory, or items of
        it share memory.
    """
    if not (is_array(out) or is_tensor(out)):
        kind = type(out).__name__
        raise TypeError(f"out is a {kind}; it takes a numpy array or a torch tensor")
    if not (is_array(value) or is_tensor(value)):
        raise TypeError(f"out was given, and what arrived is a {type(value).__name__}, no array")
    alike = is_array(out) == is_array(value) and out.dtype == value.dtype
    if not alike or out.shape != value.shape:
        raise ValueError(f"out is {_with_article(out)}; what arrived is {_with_article(value)}")
    if is_array(out):
        if not out.flags.writeable:
            raise ValueError("out is read-only; give an array that can be written to")
        steps = out.strides
    else:
        if out.is_meta:
            raise ValueError("out is on the meta device; give a tensor that has memory")
        steps = out.stride() if str(out.layout) == "torch.strided" else ()
    if any(step == 0 and size > 1 for step, size in zip(steps, out.shape, strict=False)):
        raise ValueError("items of out share memory; give an array that is not expanded")


def _with_article(value: Any) -> str:
    text = describe(value)
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"
