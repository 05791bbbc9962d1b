"""One file of tensors, in the safetensors format, with digests of header and data in its header.

A file is eight bytes of header length, the header in JSON, and the tensors one after another. Other
readers see an ordinary safetensors file. Written straight from the tensors' memory, in one pass.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import errno
import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from . import disk
from .pieces import Digest
from .refusal import refusal
from .seal import BLANK, SEAL, reseal, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .stored import TensorFile

DATA = "syncprims.data"  #: in the header's metadata: the digest of the data
COMPLEX = "syncprims.complex128"  #: and the names of tensors that are stored as pairs of float64
STATE = "syncprims.state"  #: and that it is part of a state, and no model of its own
META = "__metadata__"
OWN = {SEAL, DATA, COMPLEX, STATE, "format"}  #: in the metadata, what is no tensor's other name
LONGEST_HEADER = 100_000_000  #: bytes, as in the safetensors library

#: How the format calls types.
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
WORD = struct.Struct("<Q")  #: the length of the header
_BEGINNING = 512  # bytes, in which the metadata of our own come
_ALIGNED = 64  # bytes: where the data begin, so that every number is where processors want it


class Written(NamedTuple):
    """A file as it was written. Its seal covers its header, and that the digest of its data."""

    size: int  #: bytes
    seal: str

    def same_as(self, path: str, file: TensorFile) -> None:
        """Accept the file that was written.

        :raises CheckpointError: if `file` is another.
        """
        if file.size != self.size:
            raise refusal(path, "wrong size", f"{self.size} bytes", f"{file.size}")
        if file.seal != self.seal:
            raise refusal(path, "another file", f"the seal {self.seal}", f"{file.seal}")


# -- writing -------------------------------------------------------------------------------------


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Accept a tensor that the format can hold.

    :raises TypeError: otherwise.
    """
    dtype = torch.float64 if tensor.dtype == torch.complex128 else tensor.dtype
    if tensor.layout != torch.strided or tensor.is_quantized or dtype not in CODES:
        raise TypeError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: safetensors holds dense tensors "
            f"of {', '.join(sorted(str(d)[6:] for d in CODES))} and complex128"
        )
    if tensor.is_meta:
        raise TypeError(f"tensor {name!r} is on the meta device: it has no values to save")


def write(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    tell: Callable[[int], object] = lambda done: None,
    *,
    of_state: bool = False,
) -> Written:
    """Make the file `path` hold these tensors; return when the disk has it.

    With `of_state` it says that it is part of a state. `tell` is called with numbers of bytes as
    they are written. Needs little memory besides: a tensor that is not contiguous, or not on the
    CPU, is copied piece by piece.
    """
    metadata = {key: value for key, value in metadata.items() if key not in OWN}
    if of_state:
        metadata = {STATE: "part", **metadata}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    pairs = [name for name in order if tensors[name].dtype == torch.complex128]
    if pairs:
        metadata = {**metadata, COMPLEX: json.dumps(pairs)}
    header = _header(order, tensors, metadata)
    file = disk.NewFile(path)
    try:
        file.write(WORD.pack(len(header)) + header)
        hashed = Digest()
        size = WORD.size + len(header)
        for name in order:
            for piece in pieces(tensors[name], size):
                hashed.update(piece)
                file.write(piece)
                size += len(piece)
                tell(len(piece))
        header = header.replace(_field(DATA, BLANK), _field(DATA, hashed.hexdigest()), 1)
        header, seal = reseal(header, META)
        file.write_at(header, WORD.size)
        file.finish()
    finally:
        file.abandon()
    return Written(size, seal)


def begins_as_of_state(path: str) -> bool:
    """Tell whether a save of a state has written this file, or begun to.

    :raises OSError: if it cannot be read.
    """
    try:
        file = disk.OldFile(path)
    except OSError as error:
        if error.errno == errno.ENODATA:  # nothing is in it yet
            return True
        raise
    try:
        return STATE.encode() in file.read(0, min(file.size, _BEGINNING))
    finally:
        file.close()


def _header(
    order: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> bytes:
    entries: dict[str, Any] = {META: {DATA: BLANK, "format": "pt", **metadata}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        shape = list(tensor.shape)
        code = CODES.get(tensor.dtype, "F64")
        if tensor.dtype == torch.complex128:
            shape.append(2)
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = sealed(entries, META)[0]
    header += b" " * (-(WORD.size + len(header)) % _ALIGNED)
    if len(header) > LONGEST_HEADER:
        raise ValueError(
            f"{len(order)} tensors need a header of {len(header)} bytes, and a file may have "
            f"{LONGEST_HEADER}; allow smaller shards"
        )
    return header


def _field(key: str, value: str) -> bytes:
    return f'"{key}":"{value}"'.encode()


def pieces(tensor: torch.Tensor, offset: int = 0) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order: its own memory where that is possible.

    They come at `offset` in a file, and end where its own pieces do: what begins at a multiple of a
    large size, a system can keep in large pages, and takes in several times as fast.
    """
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not _lazy(tensor):
        whole = bytes_of(tensor)
        start = 0
        while start < size:
            end = min(size, start + disk.PIECE - (offset + start) % disk.PIECE)
            yield whole[start:end]
            start = end
    elif size <= disk.PIECE or tensor.ndim == 0:
        yield bytes_of(tensor.resolve_conj().resolve_neg().cpu().contiguous())
    else:
        rows = max(1, disk.PIECE * len(tensor) // size)
        for some in torch.split(tensor, rows):
            yield from pieces(some[0] if len(some) == 1 else some)


def _lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # A step of 1 is what a view as bytes asks for, also where torch does not care: of one number.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def content_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    hashed = xxhash.xxh3_128()
    for piece in pieces(tensor):
        hashed.update(piece)
    return hashed.hexdigest()
