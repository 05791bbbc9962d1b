"""Numpy arrays and tensors: their kinds, their devices, and their bytes.

Whether a value is one is asked without importing numpy or torch. A tensor on an accelerator never
arrives on its sender's device, since eight ranks would fill the first GPU, but on the receiver's
own: see :func:`own_device`.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard, cast

from syncprims.errors import BackendUnavailable, install
from syncprims.interface import own_device_index

from . import Array, DType, Out, Value

# -- kinds of values -----------------------------------------------------------------------------


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Return whether `value` is a dict."""
    return isinstance(value, dict)


def is_list_or_tuple(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether `value` is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_memory(value: object) -> TypeGuard[memoryview]:
    """Return whether `value` is bytes that :func:`flat` leaves as they are."""
    return isinstance(value, memoryview)


@functools.cache
def load_numpy() -> Any:
    """Return the module numpy.

    :raises BackendUnavailable: if it is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        what = "arrays and tensors between ranks need numpy, which is not installed here"
        raise BackendUnavailable(f"{what}: {install('numpy')}") from error
    return numpy


def is_array(value: object) -> bool:
    """Return whether `value` is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_scalar(value: object) -> bool:
    """Return whether `value` is a numpy number."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.number | numpy.bool_)


def is_tensor(value: object) -> bool:
    """Return whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


# -- devices -------------------------------------------------------------------------------------


def has_devices() -> bool:
    """Return whether this process may hold tensors on an accelerator."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(
        torch.cuda.is_initialized() or torch.backends.mps.is_available() or torch.xpu.is_available()
    )


def is_on_device(value: Value) -> bool:
    """Return whether `value` is a tensor whose items are on an accelerator."""
    return is_tensor(value) and value.device.type not in ("cpu", "meta")


def own_device(kind: str, local_rank: int) -> Any:
    """Return this rank's device of `kind` (``"cuda"``, ``"xpu"``, ...); the CPU if there is none.

    Which one, :func:`own_device_index` decides.
    """
    import torch

    module = getattr(torch, kind, None)
    if kind == "cpu" or module is None or not module.is_available():
        return torch.device("cpu")
    if not hasattr(module, "current_device"):  # there is only one of this kind
        return torch.device(kind, 0)
    index = own_device_index(module.current_device(), module.device_count(), local_rank)
    return torch.device(kind, index)


# -- what an array is ----------------------------------------------------------------------------


def strides_kept(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that a copy of a tensor keeps; () for those of a contiguous tensor.

    A dense tensor without overlap keeps its strides: torch's fused kernels walk bare memory.
    """
    usual = itertools.accumulate(shape[:0:-1], lambda n, size: n * max(size, 1), initial=1)
    if [*strides] == [*usual][::-1]:
        return ()
    expected = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:  # the step of a single item may be any
            if step != expected:
                return ()
            expected *= size
    return tuple(strides)


def laid_out(tensor: Array, strides: Sequence[int]) -> Any:
    """Return the items of a tensor with these strides: itself, if there are none or it has them."""
    if not strides or tensor.stride() == tuple(strides):
        return tensor
    made = tensor.detach().new_empty_strided(tensor.shape, strides)
    return made.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


class Spec(NamedTuple):
    """The description of an array without its contents."""

    library: str  #: ``"numpy"`` or ``"torch"``
    dtype: str  #: as numpy's `dtype.str`, or torch's name
    shape: tuple[int, ...]
    requires_grad: bool = False
    device: str = "cpu"  #: its kind: the receiver chooses which device of this kind
    strides: tuple[int, ...] = ()  #: of a tensor, as :func:`strides_kept`

    def encode(self) -> bytes:
        """Return it as bytes."""
        shape, strides = (",".join(map(str, numbers)) for numbers in (self.shape, self.strides))
        grad = int(self.requires_grad)
        return f"{self.library};{self.dtype};{shape};{grad};{self.device};{strides}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Spec:
        """Return what :meth:`encode` wrote.

        :raises ValueError: if these bytes are not such an encoding.
        """
        library, dtype, shape, requires_grad, device, steps = data.decode().split(";")
        if library not in ("numpy", "torch"):
            raise ValueError(f"{library!r} makes no arrays that can be sent")
        if library == "numpy" and (dtype[:1] not in "<>|" or dtype[1:2] not in "biufcmMSUV"):
            raise ValueError(f"{dtype!r} is not a dtype of an array that can be sent")
        sizes, strides = (tuple(map(int, filter(None, n.split(",")))) for n in (shape, steps))
        if strides and strides_kept(sizes, strides) != strides:
            raise ValueError(f"a tensor of shape {sizes} is not dense with the strides {strides}")
        return cls(library, dtype, sizes, requires_grad == "1", device, strides)

    def make(self, local_rank: int = 0) -> Any:
        """Return such an array, its contents not set; a tensor on this rank's own device."""
        if self.library == "numpy":
            return load_numpy().empty(self.shape, self.dtype)
        import torch

        device = own_device(self.device, local_rank)
        sizes = (self.shape, self.strides) if self.strides else (self.shape,)
        empty: Any = torch.empty_strided if self.strides else torch.empty
        made = empty(*sizes, dtype=getattr(torch, self.dtype), device=device)
        return made.requires_grad_(self.requires_grad)

    @property
    def plain(self) -> Spec:
        """The spec of what travels for it: a contiguous array in the memory of the host."""
        return self._replace(device="cpu", requires_grad=False, strides=())

    def finish(self, plain: Array, local_rank: int = 0) -> Any:
        """Return such an array with the items of one that :attr:`plain` has made."""
        if self.library == "numpy":
            return plain
        there = plain.to(own_device(self.device, local_rank))
        return laid_out(there, self.strides).requires_grad_(self.requires_grad)

    @property
    def loaded_dtype(self) -> Any:
        """The dtype object of the library."""
        if self.library == "numpy":
            return load_numpy().dtype(self.dtype)
        import torch

        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of its contents."""
        return math.prod(self.shape) * int(self.loaded_dtype.itemsize)


def library_of(obj: Value) -> str | None:
    """Return the library whose plain array `obj` is: ``"numpy"`` or ``"torch"``; None if none is.

    An instance of a subclass is not plain; but a memory map is, since other ranks get its items
    and not its file.
    """
    numpy = sys.modules.get("numpy")  # if it is not loaded, `obj` is not an array
    if numpy is not None and type(obj) in (numpy.ndarray, numpy.memmap):
        return "numpy"
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and type(obj) is torch.Tensor and not obj.is_nested
    return "torch" if is_tensor else None


def spec_of(obj: Value) -> Spec | None:
    """Return what `obj` is, or None unless it is a plain array or a dense tensor."""
    library = library_of(obj)
    if library == "numpy":
        numpy = sys.modules["numpy"]
        if obj.dtype.hasobject or numpy.dtype(obj.dtype.str) != obj.dtype:
            return None  # objects, records, and dtypes of other libraries
        return Spec("numpy", obj.dtype.str, obj.shape)
    if library == "torch":
        torch = sys.modules["torch"]
        if obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return None
        dtype, shape, strides = str(obj.dtype)[6:], tuple(obj.shape), obj.stride()
        kept = strides_kept(shape, strides)
        return Spec("torch", dtype, shape, obj.requires_grad, obj.device.type, kept)
    return None


# -- bytes ---------------------------------------------------------------------------------------

LINE = 64  #: bytes, of a processor's cache
#: Dtypes of torch that numpy has too, under the same names.
_KNOWN_TO_NUMPY = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def is_computable(dtype: DType) -> bool:
    """Return whether torch has the arithmetic of its `dtype`; some only store numbers."""
    kind = str(dtype)[6:]
    return kind in _KNOWN_TO_NUMPY or kind.startswith(("bfloat", "float8"))


def flat(obj: Value) -> Any:
    """Return the items of an array in one dimension: the very memory, where that is contiguous.

    As a numpy array if numpy has the dtype and this host has the memory, else as a tensor. Bytes
    stay a `memoryview`.
    """
    if is_memory(obj):
        return obj
    if is_array(obj):
        if obj.ndim == 1 and obj.flags.c_contiguous:
            return obj
        return load_numpy().ascontiguousarray(obj).reshape(-1)
    if not obj.is_contiguous() or obj.is_conj() or obj.is_neg():
        obj = obj.detach().resolve_conj().resolve_neg().contiguous()
    dtype = numpy_dtype(obj.dtype)
    if dtype is not None and obj.is_cpu:
        return _memory(obj, dtype)
    plain = obj.detach().reshape(-1)
    # The step of no item, or of a single one, may be any.
    return plain if len(plain) > 1 else plain.as_strided(plain.shape, (1,))


def raw(vector: Array) -> memoryview:
    """Return the bytes of what :func:`flat` returned."""
    if is_memory(vector):
        return vector
    import numpy

    if not is_array(vector):
        import torch

        vector = _memory(vector.view(torch.uint8), numpy.dtype("u1"))
    if vector.nbytes == 0:
        return memoryview(bytearray())
    return memoryview(vector.view(numpy.uint8))


def _memory(tensor: Array, dtype: DType) -> Any:
    """Return the very memory of a contiguous tensor as a numpy array of one dimension.

    Not by `Tensor.numpy`: that fixes the size of the storage, and a later `resize_` would fail.
    """
    import numpy

    if not tensor.is_cpu:  # its address means nothing here: to read there ends the process
        raise TypeError(f"the memory of a tensor on {tensor.device} is not this host's")
    count = tensor.numel()
    if not count:
        return numpy.empty(0, dtype)
    begin = tensor.data_ptr()
    if not begin:
        kind = type(tensor).__name__
        if kind not in ("Tensor", "Parameter"):
            raise TypeError(f"a {kind} has no memory: pass the tensor that it represents")
        raise ValueError(f"the memory of a tensor of {count} items has been freed")
    memory = _memory_from().from_address(begin)
    memory.tensor = tensor  # which the array keeps alive
    return numpy.frombuffer(memory, dtype, count)


@functools.cache
def _memory_from() -> Any:
    """Return the type of all memory that begins at an address."""
    import ctypes  # slow to import

    return ctypes.c_char * (1 << 60)


@functools.cache
def numpy_dtype(dtype: DType) -> Any:
    """Return the dtype of numpy that is torch's `dtype`, or None."""
    kind = str(dtype)[6:]
    return load_numpy().dtype(kind) if kind in _KNOWN_TO_NUMPY else None


def up_to_line(size: int) -> int:
    """Return the least multiple of :data:`LINE` that is not below `size`."""
    return -(-size // LINE) * LINE


def empty_array(like: Array, shape: int | tuple[int, ...], dtype: DType) -> Any:
    """Return such an array, its contents not set; of the library and on the device of `like`."""
    if is_array(like):
        import numpy

        return numpy.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=dtype, device=like.device)


def without_history(tensor: Array) -> Any:
    """Return a tensor without what torch knows of its history.

    A subclass that leaves its items to torch is then a plain tensor, as on ranks without it.
    """
    import torch

    bare = tensor.detach()
    kind = cast("Any", type(bare))
    plain: Array = torch.Tensor
    is_torchs = kind.__torch_dispatch__ is plain.__torch_dispatch__
    return bare.as_subclass(plain) if kind is not plain and is_torchs else bare


def on_host(obj: Value) -> Any:
    """Return an array or tensor in this host's memory: the very one, if it is there."""
    return obj.detach().cpu() if is_on_device(obj) else obj


# -- arrays that are written to ------------------------------------------------------------------


def is_fillable(out: Out) -> bool:
    """Return whether writing to what :func:`flat` returns writes to this array."""
    if is_memory(out):
        return not out.readonly
    if is_array(out):
        return bool(out.flags.c_contiguous and out.flags.writeable)
    return bool(out.is_contiguous() and not out.is_conj() and not out.is_neg())


def may_fill(out: Out, source: Array) -> bool:
    """Return whether `out` may be filled item by item while `source` is read in the same way."""
    if not (source.flags.c_contiguous if is_array(source) else source.is_contiguous()):
        return True  # what is read is a copy
    begin, other = _begin(out), _begin(source)
    in_place = begin == other and out.itemsize == source.itemsize
    return bool(in_place or begin + out.nbytes <= other or other + source.nbytes <= begin)


def _begin(obj: Value) -> int:
    return int(obj.__array_interface__["data"][0] if is_array(obj) else obj.data_ptr())


def mark_written(out: Out) -> None:
    """Inform torch that `out` has been written to through its bare memory."""
    if is_tensor(out):
        import torch

        torch.autograd.graph.increment_version(out)
