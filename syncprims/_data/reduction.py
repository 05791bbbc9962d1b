"""One value from many: the reductions behind ``all_reduce``.

Pure functions over the values of all ranks, in rank order. Every rank computes the same expression
in the same order, so ranks with equal processors hold the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from syncprims.errors import RankMismatch

from . import Array, DType, Out, Value, arrays
from .arrays import Spec


class Placeholder(NamedTuple):
    """Stands for an array that is reduced out of band: the array of this number of its sender."""

    spec: Spec
    number: int


def number_arrays() -> Callable[[Spec], Placeholder]:
    """Return what makes the placeholders of one object's arrays, in their order."""
    numbers = itertools.count()
    return lambda spec: Placeholder(spec, next(numbers))


Op = Literal["sum", "mean", "min", "max", "prod"]
OPS: tuple[Op, ...] = get_args(Op)
_REAL = frozenset((int, float, bool))  # what most parts are: known before all other questions
_PLAIN = _REAL | {complex}
#: What numpy and torch call the reductions of two arrays; the others add.
_FUNCTIONS = {
    "min": "minimum",
    "max": "maximum",
    "prod": "multiply",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}
#: Dtypes that torch stores on devices and does not compute with there.
_STORED_ON_DEVICES = {"torch.uint16", "torch.uint32", "torch.uint64"}


def check_op(op: str) -> Op:
    """Return a known reduction, as a plain str.

    :raises ValueError: naming the known ones.
    """
    if op not in OPS:
        raise ValueError(f"op={op!r}: known reductions are {', '.join(OPS)}")
    return OPS[OPS.index(op)]


def check_value(value: object, op: str, where: str = "value") -> None:
    """Accept a number, an array, a tensor, or a dict, list or tuple of them, that `op` can reduce.

    :raises TypeError: naming the first part that is none of these.
    """
    if type(value) in _REAL:
        return
    if arrays.is_dict(value):
        for key, part in value.items():
            check_value(part, op, f"{where}[{key!r}]")
    elif arrays.is_list_or_tuple(value):
        for index, part in enumerate(value):
            check_value(part, op, f"{where}[{index}]")
    elif arrays.is_array(value):
        _check_array(value, where)
    elif arrays.is_tensor(value):
        _check_tensor(value, op, where)
    elif not (isinstance(value, int | float | complex) or arrays.is_scalar(value)):
        raise TypeError(
            f"{where} is a {type(value).__name__}; all_reduce takes numbers, numpy arrays, torch "
            f"tensors, and dicts, lists or tuples of them"
        )
    elif op in ("min", "max") and isinstance(value, complex):
        raise TypeError(f"{where} is complex; op={op!r} takes numbers that have an order")


def _check_array(array: Array, where: str) -> None:
    masked = hasattr(array, "mask")
    if masked or array.dtype.kind in "SUVMm":
        what = "masks some of its items" if masked else f"holds {array.dtype}"
        raise TypeError(f"{where} is an array that {what}; all_reduce takes arrays of numbers")


def _check_tensor(tensor: Array, op: str, where: str) -> None:
    if tensor.is_nested:
        raise TypeError(f"{where} is a nested tensor; all_reduce takes its parts: unbind()")
    if not arrays.is_computable(tensor.dtype):
        raise TypeError(
            f"{where} is a tensor of {tensor.dtype}, which torch does not compute with; convert it"
        )
    if op in ("min", "max") and tensor.is_complex():
        raise TypeError(f"{where} is complex; op={op!r} takes numbers that have an order")
    if op not in ("sum", "mean") and str(tensor.layout) != "torch.strided":
        raise TypeError(f"{where} is {tensor.layout}; op={op!r} takes dense tensors")


def reduce(
    values: Sequence[Any],
    op: str,
    ranks: Sequence[int],
    out_of_band: Callable[[list[Any]], Any],
    where: str = "value",
    own: int = 0,
) -> Any:
    """Return the reduction of one value per rank; the values themselves are left alone.

    A tensor has the layout of that of member number `own`.

    Where a value is a placeholder, all are arrays, and the result is ``out_of_band(values)``: a
    rank may have sent its array in a slot, if the rest of its value differs from the others'.

    :raises RankMismatch: if their trees, shapes or dtypes differ, showing each rank's.
    """

    def part(key: object, label: str) -> Any:
        parts = [value[key] for value in values]
        return reduce(parts, op, ranks, out_of_band, f"{where}[{label}]", own)

    if _PLAIN.issuperset(map(type, values)):
        return reduce_numbers(values, op)
    shapes = [describe(value) for value in values]
    if len(set(shapes)) > 1:
        pairs = zip(ranks, shapes, strict=True)
        lines = "\n".join(f"  rank {rank}: {shape}" for rank, shape in pairs)
        raise RankMismatch(
            f"all_reduce of values that differ in kind, shape or dtype, at {where}:\n{lines}\n"
            f"Give every rank the same structure, with equal shapes and dtypes."
        )
    first = values[0]
    if arrays.is_dict(first):
        return {key: part(key, repr(key)) for key in first}
    if any(isinstance(value, Placeholder) for value in values):
        return out_of_band(list(values))
    if arrays.is_list_or_tuple(first):
        return _like_sequence(first, [part(index, str(index)) for index in range(len(first))])
    if arrays.is_tensor(first) and str(first.layout) != "torch.strided":
        total = sum(values[1:], first)
        return total / len(values) if op == "mean" else total
    if arrays.is_tensor(first) or arrays.is_array(first):
        result = empty_result(values[own], op)
        combine(values, result, op)
        return result
    return reduce_numbers(values, op)


def _like_sequence(first: Value, parts: list[Any]) -> Any:
    """Return `parts` in a sequence of the type of `first`, as far as that can be made of parts."""
    if hasattr(first, "_fields"):  # a named tuple
        return type(first)(*parts)
    return parts if isinstance(first, list) else tuple(parts)


def describe(value: Value) -> str:
    """Return what must agree between ranks. Python's numbers mix: 0 here, and 0.5 there."""
    if arrays.is_dict(value):
        return f"dict with keys {sorted(map(repr, value))}"
    if isinstance(value, Placeholder):
        name = "array" if value.spec.library == "numpy" else "tensor"
        return f"{name} of shape {value.spec.shape}, dtype {value.spec.loaded_dtype}"
    if arrays.is_list_or_tuple(value):
        return f"{type(value).__name__} of {len(value)}"
    if arrays.is_array(value):
        name = "array" if type(value).__name__ == "ndarray" else type(value).__name__
        return f"{name} of shape {value.shape}, dtype {value.dtype}"
    if arrays.is_tensor(value):
        where = "" if value.device.type == "cpu" else f", on {value.device.type}"
        layout = "" if str(value.layout) == "torch.strided" else f", {value.layout}"
        name = "tensor" if type(value).__name__ in ("Tensor", "Parameter") else type(value).__name__
        return f"{name} of shape {tuple(value.shape)}, dtype {value.dtype}{where}{layout}"
    return "number"


def reduce_numbers(numbers: Sequence[Any], op: str) -> Any:
    """Return the reduction of Python's numbers, one per rank."""
    if op in ("min", "max"):
        nan = next((number for number in numbers if number != number), None)
        pick: Callable[[Sequence[Any]], Any] = min if op == "min" else max
        return pick(numbers) if nan is None else nan  # as numpy and torch: NaN wins
    if op == "prod":
        return math.prod(numbers)
    total = sum(numbers)
    return total / len(numbers) if op == "mean" else total


def empty_result(value: Value, op: str) -> Any:
    """Return an array like `value` for the result of `op`, its contents not set."""
    dtype = result_dtype(value.dtype, op)
    strides = arrays.strides_kept(value.shape, value.stride()) if arrays.is_tensor(value) else ()
    if strides:
        return value.new_empty_strided(value.shape, strides, dtype=dtype)
    return arrays.empty_array(value, value.shape, dtype)


@functools.cache
def result_dtype(dtype: DType, op: str) -> Any:
    """Return the dtype of the reduction of arrays of `dtype`."""
    kind = getattr(dtype, "kind", None)  # None: of torch
    library = sys.modules["torch" if kind is None else "numpy"]
    is_bool = dtype is library.bool if kind is None else kind == "b"
    is_float = dtype.is_floating_point or dtype.is_complex if kind is None else kind not in "biu"
    result = dtype
    if op == "mean" and not is_float:
        result = library.float64
    elif op in ("sum", "prod") and is_bool:
        result = library.int64  # a count, not an OR
    return result if kind is None else library.dtype(result)


def detached(value: Value) -> Any:
    """Return `value`, its tensors without what torch knows of their history.

    Numbers of numpy are Python's then: what a rank computes by either is reduced alike.
    """
    if type(value) in _PLAIN:
        return value
    if arrays.is_scalar(value):
        return value.item()
    if arrays.is_tensor(value):
        return arrays.without_history(value)
    if arrays.is_dict(value):
        return {key: detached(part) for key, part in value.items()}
    if arrays.is_list_or_tuple(value):
        return _like_sequence(value, [detached(part) for part in value])
    return value


def combine(parts: Sequence[Any], out: Out, op: str) -> None:
    """Fill `out` with the reduction of `parts`, item by item, in their order.

    All are numpy arrays, or all are tensors. Half precision is summed in single precision. So the
    result is rounded once, and the sum under a mean cannot overflow.
    """
    if not hasattr(out.dtype, "kind"):  # a tensor
        flattened = [arrays.flat(part) for part in parts]
        room = out.contiguous()
        items = arrays.flat(room)
        if not arrays.is_tensor(items):
            combine(flattened, items, op)
        elif str(parts[0].dtype) in _STORED_ON_DEVICES:
            total = items.cpu()
            combine([part.cpu() for part in flattened], total, op)
            items.copy_(total)
        else:  # numpy does not know the dtype, or the items are on a device
            _combine_tensors(flattened, op, items)
        if room is not out:
            out.copy_(room)
    else:
        array_combiner(op, out.dtype, parts[0].dtype)(parts, out)


@functools.cache
def array_combiner(op: str, dtype: DType, of: Array) -> Callable[[Sequence[Any], Any], None]:
    """Return :func:`combine` for numpy arrays of dtype `of`, and a result of `dtype`.

    It has no numpy warnings: as everywhere, an overflow is an infinity.
    """
    numpy = sys.modules["numpy"]
    function = getattr(numpy, _FUNCTIONS.get(op, "add"))
    kind = dtype.kind
    wide = numpy.dtype("f4") if kind == "f" and dtype.itemsize == 2 else dtype
    direct = of == wide

    def fill(parts: Sequence[Any], out: Out) -> None:
        total = out if wide is dtype else numpy.empty(out.shape, wide)
        if direct and len(parts) > 1:
            function(parts[0], parts[1], out=total)
            rest = parts[2:]
        else:
            total[...] = parts[0]
            rest = parts[1:]
        for part in rest:
            function(total, part, out=total, casting="unsafe")
        if op in ("mean", "floor_mean"):
            divide = numpy.floor_divide if kind in "iu" else numpy.true_divide
            divide(total, len(parts), out=total)
        if total is not out:
            out[...] = total

    def fill_without_warnings(parts: Sequence[Any], out: Out) -> None:
        with numpy.errstate(all="ignore"):
            fill(parts, out)

    return fill_without_warnings if kind in "fc" else fill


def _combine_tensors(parts: Sequence[Any], op: str, out: Out) -> None:
    import torch

    function = getattr(torch, _FUNCTIONS.get(op, "add"))
    small = out.dtype.is_floating_point and out.dtype.itemsize < 4
    wide = torch.float32 if small else out.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total = function(total, part.to(wide))
    out.copy_(total / len(parts) if op == "mean" else total)
