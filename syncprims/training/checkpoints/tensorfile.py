"""One file of tensors, in the safetensors format, with digests of header and data in its header.

A file is eight bytes of header length, the header in JSON, and the tensors one after another. Other
readers see an ordinary safetensors file. Written straight from the tensors' memory, in one pass.
Format: https://github.com/huggingface/safetensors (README, "Format").
"""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from . import disk
from .pieces import Digest, digest_of
from .refusal import reading, refusal
from .seal import BLANK, check, is_ours, parse, reseal, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

DATA = "syncprims.data"  #: in the header's metadata: the digest of the data
COMPLEX = "syncprims.complex128"  #: and the names of tensors that are stored as pairs of float64
META = "__metadata__"
LONGEST_HEADER = 100_000_000  #: bytes, as in the safetensors library

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_WORD = struct.Struct("<Q")
_ALIGNED = 64  # bytes: where the data begin, so that every number is where processors want it
_ENTRY = {"dtype", "shape", "data_offsets"}


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
    if tensor.layout != torch.strided or tensor.is_quantized or dtype not in _CODES:
        raise TypeError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: safetensors holds dense tensors "
            f"of {', '.join(sorted(str(d)[6:] for d in _CODES))} and complex128"
        )
    if tensor.is_meta:
        raise TypeError(f"tensor {name!r} is on the meta device: it has no values to save")


def write(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    tell: Callable[[int], object] = lambda done: None,
) -> Written:
    """Make the file `path` hold these tensors; return when the disk has it.

    `tell` is called with numbers of bytes as they are written. Needs little memory besides: a
    tensor that is not contiguous, or not on the CPU, is copied piece by piece.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    pairs = [name for name in order if tensors[name].dtype == torch.complex128]
    if pairs:
        metadata = {**metadata, COMPLEX: json.dumps(pairs)}
    header = _header(order, tensors, metadata)
    file = disk.NewFile(path)
    try:
        file.write(_WORD.pack(len(header)) + header)
        hashed = Digest()
        size = _WORD.size + len(header)
        for name in order:
            for piece in pieces(tensors[name]):
                hashed.update(piece)
                file.write(piece)
                size += len(piece)
                tell(len(piece))
        header = header.replace(_field(DATA, BLANK), _field(DATA, hashed.hexdigest()), 1)
        header, seal = reseal(header, META)
        file.write_at(header, _WORD.size)
        file.finish()
    finally:
        file.abandon()
    return Written(size, seal)


def _header(
    order: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> bytes:
    entries: dict[str, Any] = {META: {DATA: BLANK, "format": "pt", **metadata}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        shape = list(tensor.shape)
        code = _CODES.get(tensor.dtype, "F64")
        if tensor.dtype == torch.complex128:
            shape.append(2)
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = sealed(entries, META)[0]
    header += b" " * (-(_WORD.size + len(header)) % _ALIGNED)
    if len(header) > LONGEST_HEADER:
        raise ValueError(
            f"{len(order)} tensors need a header of {len(header)} bytes, and a file may have "
            f"{LONGEST_HEADER}; allow smaller shards"
        )
    return header


def _field(key: str, value: str) -> bytes:
    return f'"{key}":"{value}"'.encode()


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order: its own memory where that is possible."""
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not _lazy(tensor):
        whole = _bytes(tensor)
        for start in range(0, size, disk.PIECE):
            yield whole[start : start + disk.PIECE]
    elif size <= disk.PIECE or tensor.ndim == 0:
        yield _bytes(tensor.resolve_conj().resolve_neg().cpu().contiguous())
    else:
        rows = max(1, disk.PIECE * len(tensor) // size)
        for some in torch.split(tensor, rows):
            yield from pieces(some[0] if len(some) == 1 else some)


def _lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def content_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    hashed = xxhash.xxh3_128()
    for piece in pieces(tensor):
        hashed.update(piece)
    return hashed.hexdigest()


# -- reading -------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  #: in the file
    end: int


class TensorFile:
    """A file of tensors that is mapped, its header proved.

    :raises CheckpointError: if it cannot be read, or its header is not as it was written.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path = path
        with reading(path):
            self._data = disk.map_file(path, follow=follow)
        self.size = len(self._data)
        header = self._header()
        fields = parse(path, header)
        self.metadata = self._metadata(fields.pop(META, {}))
        #: of its header; empty if somebody else wrote the file
        self.seal = check(path, header, META) if is_ours(header, DATA) else ""
        self._begin = _WORD.size + len(header)
        self.entries = {name: self._entry(name, entry) for name, entry in fields.items()}
        self._check_cover()
        self._pairs = self._complex_names()

    def prove(self, tell: Callable[[int], object] = lambda done: None) -> None:
        """Compare the data with their digest, if the file has one.

        :raises CheckpointError: if they are not what was written.
        """
        if not self.seal:
            return
        expected = self.metadata.get(DATA, "")
        found = digest_of(memoryview(self._data)[self._begin :], tell)
        if found != expected:
            raise refusal(self.path, "damaged data", f"the digest {expected}", found)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that lies in the mapped file. Changes to it stay in memory."""
        dtype, shape, start, end = self.entries[name]
        if start == end:
            found = torch.empty(shape, dtype=dtype)
        else:
            found = torch.frombuffer(self._data, dtype=torch.uint8, count=end - start, offset=start)
            if start % (16 if name in self._pairs else dtype.itemsize):
                found = found.clone()  # some processors, and some of torch, fail on such numbers
            found = found.view(dtype).reshape(shape)
        return torch.view_as_complex(found) if name in self._pairs else found

    def _header(self) -> bytes:
        size = self.size
        if size < _WORD.size:
            raise refusal(self.path, "cut off", "at least 8 bytes", f"{size}")
        (length,) = _WORD.unpack_from(self._data)
        most = min(LONGEST_HEADER, size - _WORD.size)
        if length > most:
            what = "wrong header length, or cut off"
            raise refusal(self.path, what, f"at most {most} bytes of header", f"{length}")
        return self._data[_WORD.size : _WORD.size + length]

    def _metadata(self, found: Any) -> dict[str, str]:
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise refusal(self.path, "wrong header", "metadata of texts", repr(found))
        return found

    def _entry(self, name: str, entry: Any) -> Entry:
        if not isinstance(entry, dict) or set(entry) != _ENTRY:
            raise refusal(self.path, f"wrong entry {name!r}", "dtype, shape, data_offsets", entry)
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(code) if isinstance(code, str) else None
        if dtype is None:
            raise refusal(self.path, f"dtype of {name!r}", f"one of {sorted(_DTYPES)}", repr(code))
        if not _naturals(shape) or len(shape) > 64:
            raise refusal(self.path, f"shape of {name!r}", "a list of sizes", repr(shape))
        if not _naturals(offsets) or len(offsets) != 2:
            raise refusal(self.path, f"place of {name!r}", "[start, end]", repr(offsets))
        start, end = offsets
        needs = dtype.itemsize
        for length in shape:
            needs *= length
        # Zeros in a shape can hide sizes that no tensor may have.
        if end - start != needs or any(length > 1 << 62 for length in shape):
            what = f"size of {name!r}"
            raise refusal(self.path, what, f"{needs} bytes for {dtype} {shape}", f"{end - start}")
        return Entry(dtype, tuple(shape), self._begin + start, self._begin + end)

    def _check_cover(self) -> None:
        """Accept tensors that cover the data exactly: no gap, no overlap, nothing after."""
        at = self._begin
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            if entry.start != at:
                what = f"place of {name!r}"
                raise refusal(self.path, what, f"byte {at} of the file", f"byte {entry.start}")
            at = entry.end
        if at != self.size:
            raise refusal(self.path, "wrong size, or cut off", f"{at} bytes", f"{self.size}")

    def _complex_names(self) -> set[str]:
        if COMPLEX not in self.metadata or not self.seal:
            return set()
        listed = parse(self.path, b'{"names":%s}' % self.metadata[COMPLEX].encode())["names"]
        for name in listed:
            entry = self.entries.get(name)
            if entry is None or entry.dtype != torch.float64 or entry.shape[-1:] != (2,):
                raise refusal(self.path, f"complex tensor {name!r}", "pairs of float64", entry)
        return set(listed)


def _naturals(found: Any) -> bool:
    if not isinstance(found, list):
        return False
    return all(type(value) is int and value >= 0 for value in found)
