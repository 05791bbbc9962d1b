"""Splitting items between ranks: contiguous parts whose lengths differ by at most one."""

from __future__ import annotations

from typing import Any

from .arrays import is_dict, is_tensor


def split(items: Any, index: int, count: int, *, pad: bool = False) -> Any:
    """Return part `index` of `count`; extras go to the lowest, and `items` is left alone.

    With `pad`, the last of all items is repeated until all parts are equally long.

    :raises TypeError: if `items` cannot be split, or is a `str` or `bytes`.
    :raises ValueError: if a dict's values differ in length.
    """
    if is_dict(items):
        lengths = {key: _length(value) for key, value in items.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise ValueError(
                f"the dict's values must be equally long to be split; they have {shown}"
            )
        part = items.copy()  # of the same type, with the same keys
        part.update({key: split(value, index, count, pad=pad) for key, value in items.items()})
        return part
    length = _length(items)
    size, extras = divmod(length, count)
    begin = index * size + min(index, extras)
    end = begin + size + (index < extras)
    missing = -(-length // count) - (end - begin) if pad else 0
    indices = [*range(begin, end), *[length - 1] * missing] if missing else range(begin, end)
    if hasattr(items, "select") and not is_tensor(items):  # a tensor's own is another thing
        return items.select(indices)
    if not missing:
        return items[begin:end]
    if hasattr(items, "shape"):
        return items[indices]  # an array or a tensor
    picked = [items[i] for i in indices]  # only a tuple or a list can hold an item twice
    return tuple(picked) if isinstance(items, tuple) else picked


def _length(items: Any) -> int:
    kind = type(items).__name__
    if isinstance(items, str | bytes | bytearray):
        raise TypeError(f"split takes a sequence of items, not a {kind}: put it in a list")
    ordered = hasattr(items, "__getitem__") or hasattr(items, "select")
    if not (ordered and hasattr(items, "__len__")):  # a set, the keys of a dict, an iterator
        raise TypeError(
            f"a {kind} has no order and length to split by: give a list, tuple, range, dict of "
            f"sequences, array, tensor, or something with .select"
        )
    if getattr(items, "shape", None) == ():
        raise TypeError("an array without dimensions has nothing to split")
    return len(items)
