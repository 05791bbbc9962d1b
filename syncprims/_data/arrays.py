"""Numpy arrays and tensors: what they are, apart from their contents, and their bare bytes."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal, NamedTuple

from .devices import is_on_device, own_device
from .kinds import is_array


class Spec(NamedTuple):
    """What an array is, but for its contents."""

    library: Literal["numpy", "torch"]
    dtype: str  #: as numpy's `dtype.str`, or torch's name
    shape: tuple[int, ...]
    requires_grad: bool = False
    device: str = "cpu"  #: its kind: which one of them is the receiver's choice

    def encode(self) -> bytes:
        """Return it as bytes."""
        shape = ",".join(map(str, self.shape))
        grad = int(self.requires_grad)
        return f"{self.library};{self.dtype};{shape};{grad};{self.device}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Spec:
        """Return what :meth:`encode` wrote.

        :raises ValueError: if these bytes are nothing of the kind.
        """
        library, dtype, shape, requires_grad, device = data.decode().split(";")
        if library == "numpy":
            if dtype[:1] not in "<>|" or dtype[1:2] not in "biufcmMSUV":
                raise ValueError(f"{dtype!r} is no dtype of an array that was sent")
        elif library != "torch":
            raise ValueError(f"{library!r} makes no arrays that are sent")
        sizes = tuple(int(part) for part in shape.split(",") if part)
        return cls(library, dtype, sizes, requires_grad == "1", device)  # type: ignore[arg-type]

    def make(self, local_rank: int = 0) -> Any:
        """Return such an array, its contents not set; a tensor on this rank's own device."""
        if self.library == "numpy":
            import numpy

            return numpy.empty(self.shape, self.dtype)
        import torch

        device = own_device(self.device, local_rank)
        made = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)
        return made.requires_grad_(self.requires_grad)

    @property
    def numpy_dtype(self) -> Any:
        """The dtype of a numpy array."""
        import numpy

        return numpy.dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of its contents."""
        if self.library == "numpy":
            return math.prod(self.shape) * int(self.numpy_dtype.itemsize)
        import torch

        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]


def spec_of(obj: Any) -> Spec | None:
    """Return what `obj` is, or None unless it is a plain array or a dense tensor."""
    numpy = sys.modules.get("numpy")  # not loaded: then it is no array
    if numpy is not None and type(obj) is numpy.ndarray:
        if obj.dtype.hasobject or numpy.dtype(obj.dtype.str) != obj.dtype:
            return None  # objects, records, and other people's dtypes
        return Spec("numpy", obj.dtype.str, obj.shape)
    torch = sys.modules.get("torch")
    if torch is not None and type(obj) is torch.Tensor:
        if obj.layout is not torch.strided or obj.is_quantized or obj.device.type == "meta":
            return None
        dtype, shape = str(obj.dtype)[6:], tuple(obj.shape)
        return Spec("torch", dtype, shape, obj.requires_grad, obj.device.type)
    return None


def size_of(obj: Any) -> int:
    """Return the bytes of an array or tensor."""
    return int(obj.nbytes)


def flat(obj: Any) -> Any:
    """Return the items of an array in one dimension: the very memory, where that is contiguous.

    As a numpy array if numpy has the dtype, else as a tensor.
    """
    import numpy

    if is_array(obj):
        return numpy.ascontiguousarray(obj).reshape(-1)
    plain = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    try:
        return plain.numpy()
    except TypeError:  # bfloat16 and smaller
        return plain


def raw(vector: Any) -> memoryview:
    """Return the bytes of what :func:`flat` returned."""
    import numpy

    if not is_array(vector):
        import torch

        vector = vector.view(torch.uint8).numpy()
    if vector.nbytes == 0:
        return memoryview(bytearray())
    return memoryview(vector.view(numpy.uint8))


def on_host(obj: Any) -> Any:
    """Return an array or tensor in this host's memory: the very one, if it is there."""
    return obj if is_array(obj) or not is_on_device(obj) else obj.detach().cpu()


def fits(out: Any, spec: Spec) -> bool:
    """Tell whether the bytes of such an array can be written into `out` as they are."""
    found = spec_of(out)
    same = found is not None and found[:3] == spec[:3] and found.device == spec.device
    return same and is_fillable(out)


def is_fillable(out: Any) -> bool:
    """Tell whether to write to what :func:`flat` returns is to write to this array."""
    if is_array(out):
        return bool(out.flags.c_contiguous and out.flags.writeable)
    return bool(out.is_contiguous() and not out.is_conj() and not out.is_neg())


def filled(out: Any) -> Any:
    """Return `out`, which was written to behind torch's back; torch hears of it."""
    if not is_array(out):
        import torch

        torch.autograd.graph.increment_version(out)
    return out


def is_contiguous(obj: Any) -> bool:
    """Tell whether the items of an array stand in memory one after the other."""
    return bool(obj.flags.c_contiguous if is_array(obj) else obj.is_contiguous())


def may_fill(out: Any, source: Any) -> bool:
    """Tell whether `out` may be filled item by item while `source` is read likewise."""
    if not is_contiguous(source):
        return True  # what is read is a copy
    begin, other = _begin(out), _begin(source)
    in_place = begin == other and out.itemsize == source.itemsize
    return in_place or begin + size_of(out) <= other or other + size_of(source) <= begin


def _begin(obj: Any) -> int:
    return int(obj.__array_interface__["data"][0] if is_array(obj) else obj.data_ptr())
