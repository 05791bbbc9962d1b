"""One value from many: the reductions behind ``all_reduce``.

Pure functions over the values of all ranks, in rank order. Every rank computes the same expression
in the same order, so all hold the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .errors import RankMismatch
from .kinds import is_array, is_dict, is_list_or_tuple, is_number, is_scalar, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPS = ("sum", "mean", "min", "max", "prod")


def check_op(op: str) -> None:
    """Accept a known reduction.

    :raises ValueError: naming the known ones.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r}: known reductions are {', '.join(OPS)}")


def check_value(value: object, where: str = "value") -> None:
    """Accept a number, an array, a tensor, or a dict, list or tuple of them.

    :raises TypeError: naming the first part that is none of these.
    """
    if is_dict(value):
        for key, part in value.items():
            check_value(part, f"{where}[{key!r}]")
    elif is_list_or_tuple(value):
        for index, part in enumerate(value):
            check_value(part, f"{where}[{index}]")
    elif not (is_number(value) or is_array(value) or is_tensor(value)):
        raise TypeError(
            f"{where} is a {type(value).__name__}; all_reduce takes numbers, numpy arrays, torch "
            f"tensors, and dicts, lists or tuples of them"
        )


def reduce(values: Sequence[Any], op: str, ranks: Sequence[int]) -> Any:
    """Return the reduction of one value per rank; the values themselves are left alone.

    :raises RankMismatch: if their trees, shapes or dtypes differ, showing each rank's.
    """
    return _reduce(list(values), op, ranks, "value")


def _reduce(values: list[Any], op: str, ranks: Sequence[int], where: str) -> Any:
    shapes = [_describe(value) for value in values]
    if any(shape != shapes[0] for shape in shapes):
        lines = "\n".join(f"  rank {r}: {shape}" for r, shape in zip(ranks, shapes, strict=True))
        raise RankMismatch(
            f"all_reduce of values that differ in kind, shape or dtype, at {where}:\n{lines}\n"
            f"Give every rank the same structure, with equal shapes and dtypes."
        )
    first = values[0]
    if is_dict(first):
        return {
            key: _reduce([value[key] for value in values], op, ranks, f"{where}[{key!r}]")
            for key in first
        }
    if is_list_or_tuple(first):
        parts = [
            _reduce([value[i] for value in values], op, ranks, f"{where}[{i}]")
            for i in range(len(first))
        ]
        if hasattr(first, "_fields"):  # a named tuple
            return type(first)(*parts)
        return parts if isinstance(first, list) else tuple(parts)
    if is_tensor(first):
        return _reduce_tensors(values, op)
    if is_array(first):
        return _reduce_arrays(values, op)
    return _reduce_numbers(values, op)


def _describe(value: Any) -> str:
    """Return what must agree between ranks. Python's numbers mix: 0 here, and 0.5 there."""
    if is_dict(value):
        return f"dict with keys {sorted(map(repr, value))}"
    if is_list_or_tuple(value):
        return f"{type(value).__name__} of {len(value)}"
    if is_array(value):
        return f"array of shape {value.shape}, dtype {value.dtype}"
    if is_tensor(value):
        return f"tensor of shape {tuple(value.shape)}, dtype {value.dtype}"
    if is_scalar(value) and value.dtype not in ("float64", "bool"):
        return f"number of dtype {value.dtype}"
    return "number"


def _reduce_numbers(values: list[Any], op: str) -> Any:
    if all(is_scalar(value) for value in values):
        return _reduce_scalars(values, op)
    numbers = [value.item() if is_scalar(value) else value for value in values]
    if op in ("min", "max"):
        nan = next((number for number in numbers if number != number), None)
        pick: Callable[[list[Any]], Any] = min if op == "min" else max
        return pick(numbers) if nan is None else nan  # as numpy and torch: NaN wins
    if op == "prod":
        return math.prod(numbers)
    total = sum(numbers)
    return total / len(numbers) if op == "mean" else total


def _reduce_scalars(values: list[Any], op: str) -> Any:
    import numpy

    if values[0].dtype.kind in "iu" and op in ("sum", "prod"):
        exact = _reduce_numbers([int(value) for value in values], op)
        bounds = numpy.iinfo(values[0].dtype)
        return values[0].dtype.type(exact) if bounds.min <= exact <= bounds.max else exact
    return _reduce_arrays([numpy.asarray(value) for value in values], op)[()]


def _reduce_arrays(values: list[Any], op: str) -> Any:
    import numpy

    first = values[0]
    kind = first.dtype.kind
    if op == "mean":
        dtype = numpy.dtype("f8") if kind in "biu" else first.dtype
    elif kind == "b" and op in ("sum", "prod"):
        dtype = numpy.dtype("i8")  # a count, not an OR
    else:
        dtype = first.dtype
    combine = {"min": numpy.minimum, "max": numpy.maximum, "prod": numpy.multiply}.get(
        op, numpy.add
    )
    # Half precision is added up in single: rounded once, and a mean cannot overflow on its way.
    wide = numpy.dtype("f4") if dtype == numpy.dtype("f2") else dtype
    result = numpy.array(first, dtype=wide)
    for value in values[1:]:
        combine(result, value, out=result, casting="unsafe")
    if op == "mean":
        result /= len(values)
    return result.astype(dtype, copy=False)


def _reduce_tensors(values: list[Any], op: str) -> Any:
    import torch

    first = values[0].detach()
    exact = not (first.is_floating_point() or first.is_complex())
    dtype = first.dtype
    if op == "mean" and exact:
        dtype = torch.float64
    elif dtype is torch.bool and op in ("sum", "prod"):
        dtype = torch.int64
    combine = {"min": torch.minimum, "max": torch.maximum, "prod": torch.mul}.get(op, torch.add)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype  # as for arrays
    result = first.to(wide, copy=True)
    for value in values[1:]:
        result = combine(result, value.detach().to(wide))
    return (result / len(values) if op == "mean" else result).to(dtype)


def copy_into(out: Any, value: Any) -> Any:
    """Return `out`, now holding `value`.

    :raises TypeError: if `out` is neither a numpy array nor a tensor.
    :raises ValueError: if its shape differs, or its dtype cannot hold the value's exactly.
    """
    if not (is_array(out) or is_tensor(out)):
        raise TypeError(f"out is a {type(out).__name__}; it takes a numpy array or a torch tensor")
    if not (is_array(value) or is_tensor(value)):
        raise TypeError(f"out was given, and what arrived is a {type(value).__name__}, no array")
    if tuple(out.shape) != tuple(value.shape) or str(out.dtype) != str(value.dtype):
        raise ValueError(f"out is an {_describe(out)}; what arrived is an {_describe(value)}")
    if is_array(out):
        out[...] = value
    else:
        out.detach().copy_(value)
    return out
