"""Files of tensors in the safetensors format, with a digest of the whole file in the header.

A file is eight bytes of header length, the header in JSON, and the tensors one after another. Other
readers see an ordinary safetensors file. It is written straight from the tensors' memory, in one
pass. Format: https://github.com/huggingface/safetensors (README, "Format").

The safetensors library neither syncs nor computes a digest; it copies what is not contiguous or not
on the CPU as a whole, and reads through a memory map, where a disk error ends the process. So the
bytes are written and read here. Tests read and write the same files with the library.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from syncprims import get_local_world_size
from syncprims._data.arrays import raw
from syncprims._world.processes import load_libc

from . import filesystem
from .integrity import (
    BLANK,
    CHUNK,
    SEAL,
    ChunkedDigest,
    dump,
    has_seal,
    parse,
    put_seal,
    reading,
    refusal,
    take_seal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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
_READ_SIZE = 1 << 20  # bytes that are read and then hashed: they fit the processor's cache
_FEW_CHUNKS = 4  # up to which threads are not worth starting
_MOST_THREADS = 8  # more would only wait for memory
_HUGE = 4 << 20  # bytes: less memory may contain no whole huge page


# -- tensors --------------------------------------------------------------------------------------


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise if the format cannot hold a tensor.

    :raises TypeError: in that case.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _CODES:
        raise TypeError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: safetensors holds dense tensors "
            f"of {', '.join(sorted(str(d)[6:] for d in _CODES))}"
        )
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


def _pieces(tensor: torch.Tensor, offset: int = 0) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order: views of its own memory where that is possible.

    `offset` is where the tensor begins in the file. Pieces end at multiples of the chunk size:
    Linux can keep what begins there in large pages, and accepts it several times as fast.
    """
    tensor = tensor.detach()
    size = byte_size([tensor])
    if size == 0:
        return
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy:
        memory = _bytes_of(tensor)
        start = 0
        while start < size:
            end = min(size, start + CHUNK - (offset + start) % CHUNK)
            yield memory[start:end]
            start = end
    elif size <= CHUNK or tensor.ndim == 0:
        yield _bytes_of(tensor.resolve_conj().resolve_neg().cpu().contiguous())
    else:
        rows = max(1, CHUNK * len(tensor) // size)
        for some in torch.split(tensor, rows):
            yield from _pieces(some[0] if len(some) == 1 else some)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # A view as bytes needs a stride of 1. The stride of a single number may be anything.
    return raw(tensor.as_strided((tensor.numel(),), (1,)))


def content_digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the tensors' bytes."""
    hashed = xxhash.xxh3_128()
    for piece in itertools.chain.from_iterable(map(_pieces, tensors)):
        hashed.update(piece)
    return hashed.hexdigest()


# -- writing --------------------------------------------------------------------------------------


def write_safetensors(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> str:
    """Write these tensors to the new file `path`, sync it, and return its digest.

    A tensor that is not contiguous, or not on the CPU, is copied piece by piece, so little memory
    is needed.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    begin = _make_beginning({name: tensors[name] for name in order}, metadata)
    with contextlib.closing(filesystem.NewFile(path)) as file:
        hashed, size = ChunkedDigest(), len(begin)
        hashed.update(begin)
        file.write(begin)
        for name in order:
            for piece in _pieces(tensors[name], size):
                hashed.update(piece)
                file.write(piece)
                size += len(piece)
        found = hashed.hexdigest()
        file.write_at(put_seal(begin, found), 0)
        file.finish()
    return found


def _make_beginning(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the length of the header and the header, still without the digest."""
    own = {SEAL: BLANK, _VERSION: "2", "format": "pt"}
    entries: dict[str, Any] = {METADATA: {**own, **metadata, **own}}
    offset = 0
    for name, tensor in tensors.items():
        begin, offset = offset, offset + byte_size([tensor])
        code, shape = _CODES[tensor.dtype], [*tensor.shape]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, offset]}
    header = dump(entries)
    header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
    if len(header) > _LONGEST_HEADER:
        raise ValueError(
            f"{len(tensors)} tensors need a header of {len(header)} bytes, and a file may have "
            f"{_LONGEST_HEADER}; allow smaller shards"
        )
    return _LENGTH.pack(len(header)) + header


# -- reading --------------------------------------------------------------------------------------


def run_parallel(work: Callable[[int], object], count: int) -> None:
    """Call ``work(number)`` for all numbers below `count`, on threads.

    There are as many threads as processors for each rank of this machine. After an error no more
    work is begun; it is raised when the threads have ended.
    """
    threads = min((os.cpu_count() or 1) // max(1, get_local_world_size()), _MOST_THREADS)
    if count <= _FEW_CHUNKS or threads < 2:
        for number in range(count):
            work(number)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="syncprims-load") as pool:
        tasks = [pool.submit(work, number) for number in range(count)]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Entry(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  #: in the file
    end: int


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
            self.entries = self._parse_entries(fields, len(begin))
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
        chunks = [
            (number, pieces)
            for number, pieces in enumerate(self._pieces_by_chunk(into))
            if check or any(memory is not None for _, _, memory in pieces)
        ]
        digests = [b""] * len(chunks)
        local = threading.local()

        def read_chunk(index: int) -> None:
            number, pieces = chunks[index]
            hashed = xxhash.xxh3_128(self._begin[number * CHUNK : (number + 1) * CHUNK])
            if check and not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(_READ_SIZE))
            for start, end, memory in pieces:
                for at in range(start, end, _READ_SIZE) if check or memory is not None else ():
                    buffer: memoryview = local.buffer if memory is None else memory[at - start :]
                    some = buffer[: min(_READ_SIZE, end - at)]
                    self._file.read_into(some, at)
                    if check:
                        hashed.update(some)
            digests[index] = hashed.digest()

        with reading(self.path):
            run_parallel(read_chunk, len(chunks))
            self._file.check_unchanged()
        if check:
            found = xxhash.xxh3_128_hexdigest(b"".join(digests))
            if found != self._digest:
                raise refusal(self.path, "damaged data", f"the digest {self._digest}", found)

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own.

        :raises CheckpointError: as :meth:`read`.
        """
        dtype, shape, _, _ = self.entries[name]
        tensor = in_huge_pages(torch.empty(shape, dtype=dtype, device="cpu"))
        self.read({name: tensor})
        return tensor

    def _pieces_by_chunk(
        self, into: Mapping[str, torch.Tensor]
    ) -> list[list[tuple[int, int, memoryview | None]]]:
        """Return the pieces of each chunk of the data: begin, end, and the memory of a tensor."""
        chunks: list[list[tuple[int, int, memoryview | None]]] = [
            [] for _ in range(-(-self._file.size // CHUNK))
        ]
        done = len(self._begin)

        def add(end: int, memory: memoryview | None) -> None:
            nonlocal done
            begin = done
            while done < end:
                stop = min(end, (done // CHUNK + 1) * CHUNK)
                part = None if memory is None else memory[done - begin : stop - begin]
                chunks[done // CHUNK].append((done, stop, part))
                done = stop

        targets = ((self.entries[name], tensor) for name, tensor in into.items() if tensor.numel())
        for entry, tensor in sorted(targets, key=lambda target: target[0].start):
            add(entry.start, None)
            add(entry.end, _bytes_of(tensor))
        add(self._file.size, None)
        return chunks

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

    def _parse_entries(self, fields: dict[str, Any], begin: int) -> dict[str, _Entry]:
        """Return where each tensor is. They cover the data exactly: no gap, no overlap."""
        entries: dict[str, _Entry] = {}
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
            entries[name] = _Entry(dtype, tuple(shape), begin + start, begin + end)
        at = begin
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != at:
                what = f"position of {name!r}"
                raise refusal(self.path, what, f"byte {at} of the file", f"byte {entry.start}")
            at = entry.end
        if at != self._file.size:
            what = "wrong size, or cut off"
            raise refusal(self.path, what, f"{at} bytes", f"{self._file.size}")
        return entries


class StoredTensor:
    """A tensor of a checkpoint that is still in its file."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self.file = file
        self.name = name  #: in the file
        self.dtype, self.shape, _, _ = file.entries[name]

    def tensor(self) -> torch.Tensor:
        """Return it in memory of its own.

        :raises CheckpointError: if it cannot be read.
        """
        return self.file.read_tensor(self.name)
