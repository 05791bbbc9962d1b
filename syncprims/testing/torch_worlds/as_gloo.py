"""What Gloo refuses or computes wrongly: a test of a program that asks for it does not pass there.

Measured with torch 2.13. Under its own name, the backend of this library accepts all of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from syncprims.c10d import SyncProcessGroup
from syncprims.c10d.point_to_point import Channel
from syncprims.c10d.torch_internals import replaced

_WHOLE = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
#: By reduction, "" for calls without one: the dtypes of tensors in collectives.
_DTYPES = {
    **dict.fromkeys(("", "sum"), _WHOLE | _FLOATS | _COMPLEX),
    **dict.fromkeys(("min", "max", "prod"), _WHOLE | _FLOATS),
    **dict.fromkeys(("band", "bor", "bxor"), _WHOLE),
    "mean": _FLOATS | _COMPLEX,
}
_TRANSFERS = ("send", "recv")  # of any dtype that is not quantized
#: Collectives that take tensors as they lie in memory. The others copy those in another order.
_AS_THEY_LIE = (
    "all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all_single",
)  # fmt: skip


def check(kind: str, op: str | None, tensors: Sequence[torch.Tensor]) -> str:
    """Return what Gloo needs to be equal on all ranks beside the rest, as a part of a label.

    :param tensors: those of a call of this kind and reduction, the output first.
    :raises ValueError: if Gloo refuses the call, or would fill tensors with wrong values.
    """
    first = tensors[0]
    if first.device.type != "cpu":
        return ""
    if first.is_sparse and (kind, op) != ("all_reduce", "sum"):
        raise ValueError("of sparse tensors, Gloo has only the sum by all_reduce")
    moved = _DTYPES[op or ""] - (_COMPLEX if kind == "gather" else set())
    if first.is_quantized or (first.dtype not in moved and kind not in _TRANSFERS):
        what = f"{op} of " if op else ""
        raise ValueError(f"Gloo refuses {what}{str(first.dtype)[6:]} here; convert the tensors")
    if first.is_sparse or kind not in _AS_THEY_LIE + _TRANSFERS:
        return ""
    orders = [_order_in_memory(tensor) for tensor in tensors]
    plain = [d for d in range(first.dim()) if first.size(d) > 1]
    if kind.startswith("reduce_scatter"):  # inputs with gaps are copied
        first_input = len(tensors) > 1
        orders[first_input:] = [order or plain for order in orders[first_input:]]
    refused = (kind in _TRANSFERS and orders != [plain]) or (
        kind == "all_to_all_single"
        and any(
            not (one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last))
            for one in tensors
        )
    )
    if refused or None in orders or orders.count(orders[0]) < len(orders):
        raise ValueError(
            "Gloo refuses these layouts, or takes the items as they lie in memory and gives wrong "
            "values: give it contiguous() tensors, and copy back what it fills"
        )
    return "" if orders[0] == plain else f", by Gloo in the order {orders[0]} of dimensions"


def _order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions from the outermost in memory; None if items have gaps, or overlap."""
    order = list(range(tensor.dim()))
    if not tensor.is_contiguous():
        order.sort(key=tensor.stride, reverse=True)
        if not tensor.permute(order).is_contiguous():
            return None
    return [d for d in order if tensor.size(d) > 1]


def as_gloo() -> contextlib.AbstractContextManager[None]:
    """Return a context in which what a program asks of Gloo fails in this process as with Gloo."""
    return replaced((Channel, "sends_meet", True), (SyncProcessGroup, "limits", check))
