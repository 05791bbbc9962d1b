"""Files of tensors in the safetensors format, with a digest of the whole file in the header.

A file is eight bytes of header length, the header in JSON, and the tensors one after another. Other
readers see an ordinary safetensors file. It is written straight from the tensors' memory, in one
pass. Format: https://github.com/huggingface/safetensors (README, "Format").

The digest is XXH3-128 of the digests of the file's pieces: the header, and the tensors in file
order, cut where they cross a multiple of :data:`CHUNK`. So threads can check pieces in parallel.

The safetensors library neither syncs nor computes a digest; it copies what is not contiguous or not
on the CPU as a whole, and reads through a memory map, where a disk error ends the process. So the
bytes are written and read here. Tests read and write the same files with the library.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash

from syncprims import get_local_world_size
from syncprims._data.arrays import raw
from syncprims._system.processes import load_libc

from . import filesystem
from .integrity import BLANK, SEAL, dump, has_seal, parse, put_seal, reading, refusal, take_seal

CHUNK = 1 << 20  #: bytes of a piece: what was just read or hashed is still in the cache
METADATA = "__metadata__"
_VERSION = "syncprims.format"  # in the metadata, beside the digest
#: Keys of the metadata that are not the second name of a tied tensor.
RESERVED = {SEAL, _VERSION, "format"}
_LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH = struct.Struct("<Q")  # of the header
_ALIGNMENT = 64  # bytes: of the first tensor in the file
_FEW_PIECES = 16  # up to which threads are not worth starting
_MOST_THREADS = 8  # more would only wait for memory
_HUGE = 4 << 20  # bytes: less memory may contain no whole huge page


# -- tensors --------------------------------------------------------------------------------------


def check_storable(name: object, tensor: object) -> None:
    """Raise if the format cannot hold a value under a name.

    :raises TypeError: in that case.
    """
    if not isinstance(tensor, torch.Tensor):
        what = f"{name!r} is of type {type(tensor).__name__}, and a weights file holds tensors"
        raise TypeError(f"{what}; save_state() saves the rest, too")
    if not isinstance(name, str) or name == METADATA:
        raise TypeError(f"a tensor is called {name!r}: it takes a str, and not {METADATA!r}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _CODES:
        takes = ", ".join(sorted(str(dtype)[6:] for dtype in _CODES))
        what = f"tensor {name!r} is {tensor.dtype}, {tensor.layout}"
        raise TypeError(f"{what}; safetensors holds dense tensors of {takes}")
    if tensor.is_meta:
        raise TypeError(f"tensor {name!r} is on the meta device: it has no values to save")


def byte_size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of tensors together, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, new and on the CPU; its memory is in huge pages, where the system has them.

    Most of the time that a load into new memory takes, the kernel provides one small page after
    the other. In huge pages (madvise(2), MADV_HUGEPAGE) it is filled more than twice as fast.
    """
    size = tensor.untyped_storage().nbytes()
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has such advice
        begin = tensor.untyped_storage().data_ptr()
        inset = -begin % mmap.PAGESIZE
        whole = (size - inset) // mmap.PAGESIZE * mmap.PAGESIZE
        memory = ctypes.c_void_p(begin + inset), ctypes.c_size_t(whole)
        load_libc().madvise(*memory, mmap.MADV_HUGEPAGE)  # without huge pages, it does nothing
    return tensor


def _cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces of these bytes of a file: beginnings and ends.

    Linux can keep what begins at a multiple of a power of two in large pages, and accepts it
    several times as fast.
    """
    while start < end:
        stop = min(end, (start // CHUNK + 1) * CHUNK)
        yield start, stop
        start = stop


def _pieces(tensor: torch.Tensor, offset: int = 0) -> Iterator[memoryview]:
    """Yield the pieces of a tensor that begins at `offset` in its file.

    They are views of its own memory, if it is contiguous there.
    """
    end = offset + byte_size([tensor])
    if end > offset:
        plain = _flat(tensor.detach().resolve_conj().resolve_neg().contiguous()).view(torch.uint8)
        for start, stop in _cut(offset, end):
            yield raw(plain[start - offset : stop - offset].cpu())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in one dimension, of stride 1."""
    return tensor.as_strided((tensor.numel(),), (1,))  # the stride of a single number may be any


def content_digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the tensors' bytes."""
    hashed = xxhash.xxh3_128()
    for tensor in tensors:
        for piece in _pieces(tensor):
            hashed.update(piece)
    return hashed.hexdigest()


# -- writing --------------------------------------------------------------------------------------


def write_safetensors(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> str:
    """Write these tensors to the new file `path`, sync it, and return its digest.

    A tensor that is not contiguous is copied. One on another device is copied piece by piece.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    begin = _make_beginning({name: tensors[name] for name in order}, metadata)
    with contextlib.closing(filesystem.NewFile(path)) as file:
        total, size = xxhash.xxh3_128(xxhash.xxh3_128_digest(begin)), len(begin)
        file.write(begin)
        for name in order:
            for piece in _pieces(tensors[name], size):
                total.update(xxhash.xxh3_128_digest(piece))
                file.write(piece)
            size += byte_size([tensors[name]])
        file.write_at(put_seal(begin, total.hexdigest()), 0)
        file.finish()
    return total.hexdigest()


def _make_beginning(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the length of the header and the header, still without the digest."""
    own = {SEAL: BLANK, _VERSION: "1", "format": "pt"}
    entries: dict[str, Any] = {METADATA: {**own, **metadata, **own}}
    offset = 0
    for name, tensor in tensors.items():
        begin, offset = offset, offset + byte_size([tensor])
        code, shape = _CODES[tensor.dtype], [*tensor.shape]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, offset]}
    header = dump(entries)
    header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
    if len(header) > _LONGEST_HEADER:
        what = f"{len(tensors)} tensors need a header of {len(header)} bytes"
        raise ValueError(f"{what}, and it may have {_LONGEST_HEADER}; allow smaller shards")
    return _LENGTH.pack(len(header)) + header


# -- reading --------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that is still in its file."""

    file: SafetensorsFile
    name: str  #: in the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  #: in the file
    end: int

    def load(self) -> torch.Tensor:
        """Return it in memory of its own.

        :raises CheckpointError: as :meth:`SafetensorsFile.read`.
        """
        tensor = self.allocate()
        self.file.read({self.name: tensor})
        return tensor

    def allocate(self) -> torch.Tensor:
        """Return new memory for it."""
        return in_huge_pages(torch.empty(self.shape, dtype=self.dtype, device="cpu"))


class SafetensorsFile:
    """An open file of tensors whose header is sound. The caller closes it.

    :raises CheckpointError: if it cannot be read, or its header is not one.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path = path
        with reading(path):
            self._file = filesystem.ExistingFile(path, follow=follow)
        try:
            with reading(path):
                begin = self._read_beginning()
            fields = parse(path, begin[_LENGTH.size :])
            metadata = fields.pop(METADATA, {})
            texts = metadata.values() if isinstance(metadata, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise refusal(path, "wrong header", "metadata of texts", repr(metadata))
            self.metadata: dict[str, str] = metadata
            self.tensors: dict[str, StoredTensor] = self._parse_entries(fields, len(begin))
            self._begin, self._digest = take_seal(begin)
            self._is_ours = has_seal(begin, _VERSION)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check_digest(self, expected: str) -> None:
        """Raise if this is not the file that was written, by the digest in its header.

        :raises CheckpointError: in that case.
        """
        if self._digest != expected:
            raise refusal(self.path, "another file", f"the digest {expected}", self._digest)

    def read(self, into: Mapping[str, torch.Tensor], *, check: bool = False) -> None:
        """Read tensors, by name, into others of the same dtype and size, contiguous, on the CPU.

        With `check`, all of the file is read, and compared with its digest, if it has one: if this
        raises, the tensors hold anything. A megabyte of memory is needed for each thread.

        :raises CheckpointError: if the file cannot be read, is not what was written, or was changed
            meanwhile.
        """
        check = check and self._is_ours
        pieces: list[tuple[int, int, memoryview | None]] = []
        for name, _, _, start, end in (stored[1:] for stored in self.tensors.values()):
            memory = raw(_flat(into[name])) if name in into and end > start else None
            for begin, stop in _cut(start, end) if check or memory is not None else ():
                part = None if memory is None else memory[begin - start : stop - start]
                pieces.append((begin, stop, part))
        threads = min((os.cpu_count() or 1) // max(1, get_local_world_size()), _MOST_THREADS)
        threads = max(1, threads) if len(pieces) > _FEW_PIECES else 1
        buffers = deque(memoryview(bytearray(CHUNK if check else 0)) for _ in range(threads))

        def read_piece(piece: tuple[int, int, memoryview | None]) -> bytes:
            begin, stop, part = piece
            buffer = buffers.pop()
            data = buffer[: stop - begin] if part is None else part
            self._file.read_into(data, begin)
            digest = xxhash.xxh3_128_digest(data) if check else b""
            buffers.append(buffer)
            return digest

        with reading(self.path):
            if threads == 1:
                digests = [*map(read_piece, pieces)]
            else:
                with ThreadPoolExecutor(threads, thread_name_prefix="syncprims-load") as pool:
                    digests = [*pool.map(read_piece, pieces)]
            self._file.check_unchanged()
        if check:
            total = b"".join([xxhash.xxh3_128_digest(self._begin), *digests])
            if (found := xxhash.xxh3_128_hexdigest(total)) != self._digest:
                raise refusal(self.path, "damaged data", f"the digest {self._digest}", found)

    def _read_beginning(self) -> bytes:
        size = self._file.size
        if size < _LENGTH.size:
            raise refusal(self.path, "cut off", "at least 8 bytes", f"{size}")
        begin = self._file.read(0, _LENGTH.size)
        (length,) = _LENGTH.unpack(begin)
        most = min(_LONGEST_HEADER, size - _LENGTH.size)
        if length > most:
            what = "wrong header length, or cut off"
            raise refusal(self.path, what, f"at most {most} bytes of header", f"{length}")
        return begin + self._file.read(_LENGTH.size, length)

    def _parse_entries(self, fields: dict[str, Any], begin: int) -> dict[str, StoredTensor]:
        """Return the tensors in file order. They cover the data exactly: no gap, no overlap."""
        tensors: list[StoredTensor] = []
        for name, field in fields.items():
            try:
                dtype, shape = _DTYPES[field["dtype"]], field["shape"]
                start, end = field["data_offsets"]
                numbers = [*shape, start, end]
                # A zero in a shape can hide other sizes that no tensor may have.
                sound = all(type(n) is int and 0 <= n <= 1 << 62 for n in numbers)
                sound = sound and len(shape) <= 64 and len(field) == 3
                if not (sound and end - start == dtype.itemsize * math.prod(shape)):
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                expected = "a known dtype, a shape, and data_offsets of that size"
                raise refusal(self.path, f"wrong entry {name!r}", expected, repr(field)) from None
            place = begin + start, begin + end
            tensors.append(StoredTensor(self, name, dtype, tuple(shape), *place))
        tensors.sort(key=lambda stored: (stored.start, stored.end))
        at = begin
        for stored in tensors:
            if stored.start != at:
                what = f"position of {stored.name!r}"
                raise refusal(self.path, what, f"byte {at} of the file", f"byte {stored.start}")
            at = stored.end
        if at != self._file.size:
            what = "wrong size, or cut off"
            raise refusal(self.path, what, f"{at} bytes", f"{self._file.size}")
        return {stored.name: stored for stored in tensors}


def read_safetensors(path: str, digest: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the file with this digest, read and checked in one pass.

    :raises CheckpointError: if it is another file, or not as it was written.
    """
    with contextlib.closing(SafetensorsFile(path)) as file:
        file.check_digest(digest)
        tensors = {name: stored.allocate() for name, stored in file.tensors.items()}
        file.read(tensors, check=True)
    return tensors
