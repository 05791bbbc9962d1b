"""What Gloo refuses, so that a test of a program which asks for it does not pass where it fails.

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
_TRANSFERS = {"send", "recv"}  # of any dtype that is not quantized


def check(kind: str, op: str | None, tensors: Sequence[torch.Tensor]) -> str:
    """Return what Gloo needs to be equal on all ranks beside the rest, as a part of a label.

    :param tensors: those of a call of this kind and reduction, the output first.
    :raises ValueError: if Gloo refuses the call.
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
    return ""


def as_gloo() -> contextlib.AbstractContextManager[None]:
    """Return a context in which what a program asks of Gloo fails in this process as with Gloo."""
    return replaced(
        (Channel, "sends_meet", True), (SyncProcessGroup, "limits", staticmethod(check))
    )
