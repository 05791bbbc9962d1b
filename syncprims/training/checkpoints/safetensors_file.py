"""Files of tensors in the safetensors format, with digests of header and data in the header.

A file is eight bytes of header length, the header in JSON, and the tensors one after another. Other
readers see an ordinary safetensors file. It is written straight from the tensors' memory, in one
pass. Format: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from syncprims import get_local_world_size
from syncprims._data.arrays import raw

from . import filesystem
from .huge_pages import in_huge_pages
from .integrity import (
    BLANK_DIGEST,
    CHUNK,
    DIGEST_KEY,
    ChunkedDigest,
    check_digest,
    dump_with_digest,
    has_digest,
    parse,
    reading,
    refusal,
    replace_digest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

METADATA = "__metadata__"
_DATA = "syncprims.data"  # in the metadata: the digest of the data
_COMPLEX = "syncprims.complex128"  # and the names of tensors that are stored as pairs of float64
_STATE = "syncprims.state"  # and that the file is part of a state, and not a model
#: Keys of the metadata that are not the second name of a tied tensor.
RESERVED = {DIGEST_KEY, _DATA, _COMPLEX, _STATE, "format"}
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
_BEGINNING = 512  # bytes that contain the library's own metadata
_ALIGNMENT = 64  # bytes: of the first tensor in the file
_READ_SIZE = 1 << 20  # bytes that are read and then hashed: they fit the processor's cache
_FEW_PARTS = 4  # up to which threads are not worth starting
_MOST_THREADS = 8  # more would only wait for memory


def _ignore(size: int) -> None: ...


class FileRecord(NamedTuple):
    """A file as it was written. Its header digest covers the header, and so the data's digest."""

    size: int  #: bytes
    digest: str  #: of the header; in torch's own format, of all bytes

    def check(self, path: str, file: SafetensorsFile) -> None:
        """Raise if `file` is not the file that was written.

        :raises CheckpointError: in that case.
        """
        if file.size != self.size:
            raise refusal(path, "wrong size", f"{self.size} bytes", f"{file.size}")
        if file.digest != self.digest:
            raise refusal(path, "another file", f"the digest {self.digest}", f"{file.digest}")


# -- writing --------------------------------------------------------------------------------------


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise if the format cannot hold a tensor.

    :raises TypeError: in that case.
    """
    dtype = torch.float64 if tensor.dtype == torch.complex128 else tensor.dtype
    if tensor.layout != torch.strided or tensor.is_quantized or dtype not in _CODES:
        raise TypeError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: safetensors holds dense tensors "
            f"of {', '.join(sorted(str(d)[6:] for d in _CODES))} and complex128"
        )
    if tensor.is_meta:
        raise TypeError(f"tensor {name!r} is on the meta device: it has no values to save")


def byte_size(tensors: Iterable[torch.Tensor]) -> int:
    """Return the size of tensors together, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def write_safetensors(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    on_progress: Callable[[int], object] = _ignore,
    *,
    of_state: bool = False,
) -> FileRecord:
    """Write these tensors to the new file `path`, and sync it.

    `of_state` marks it as part of a state. `on_progress` is called with numbers of bytes. A tensor
    that is not contiguous, or not on the CPU, is copied piece by piece, so little memory is needed.
    """
    metadata = {key: value for key, value in metadata.items() if key not in RESERVED}
    if of_state:
        metadata = {_STATE: "part", **metadata}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    pairs = [name for name in order if tensors[name].dtype == torch.complex128]
    if pairs:
        metadata = {**metadata, _COMPLEX: json.dumps(pairs)}
    header = _make_header(order, tensors, metadata)
    with contextlib.closing(filesystem.NewFile(path)) as file:
        file.write(_LENGTH.pack(len(header)) + header)
        hashed = ChunkedDigest()
        size = _LENGTH.size + len(header)
        for name in order:
            for piece in _pieces(tensors[name], size):
                hashed.update(piece)
                file.write(piece)
                size += len(piece)
                on_progress(len(piece))
        blank, found = (f'"{_DATA}":"{d}"'.encode() for d in (BLANK_DIGEST, hashed.hexdigest()))
        header, header_digest = replace_digest(header.replace(blank, found, 1), METADATA)
        file.write_at(header, _LENGTH.size)
        file.finish()
    return FileRecord(size, header_digest)


def begins_as_of_state(path: str) -> bool:
    """Return whether a save of a state has written this file, or begun to.

    A file that cannot be read is logged, and taken for another.
    """
    try:
        with contextlib.closing(filesystem.ExistingFile(path)) as file:
            return _STATE.encode() in file.read(0, min(file.size, _BEGINNING))
    except OSError as error:
        is_empty = error.errno == errno.ENODATA
        if not is_empty:
            filesystem.LOG.warning("%s stays, since it cannot be read: %s", path, error)
        return is_empty


def _make_header(
    order: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> bytes:
    entries: dict[str, Any] = {METADATA: {_DATA: BLANK_DIGEST, "format": "pt", **metadata}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        pair = [2] if tensor.dtype == torch.complex128 else []
        end = offset + byte_size([tensor])
        entries[name] = {
            "dtype": _CODES.get(tensor.dtype, "F64"),
            "shape": [*tensor.shape, *pair],
            "data_offsets": [offset, end],
        }
        offset = end
    header = dump_with_digest(entries, METADATA)[0]
    header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
    if len(header) > _LONGEST_HEADER:
        raise ValueError(
            f"{len(order)} tensors need a header of {len(header)} bytes, and a file may have "
            f"{_LONGEST_HEADER}; allow smaller shards"
        )
    return header


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
            end = min(size, start + filesystem.CHUNK - (offset + start) % filesystem.CHUNK)
            yield memory[start:end]
            start = end
    elif size <= filesystem.CHUNK or tensor.ndim == 0:
        yield _bytes_of(tensor.resolve_conj().resolve_neg().cpu().contiguous())
    else:
        rows = max(1, filesystem.CHUNK * len(tensor) // size)
        for some in torch.split(tensor, rows):
            yield from _pieces(some[0] if len(some) == 1 else some)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # A view as bytes needs a stride of 1. The stride of a single number may be anything.
    return raw(tensor.as_strided((tensor.numel(),), (1,)))


def content_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    hashed = xxhash.xxh3_128()
    for piece in _pieces(tensor):
        hashed.update(piece)
    return hashed.hexdigest()


# -- reading --------------------------------------------------------------------------------------


def run_parallel(
    work: Callable[[int], int], count: int, on_progress: Callable[[int], object]
) -> None:
    """Call ``work(number)`` for all numbers below `count`, on threads.

    There are as many threads as processors for each rank of this machine. `work` returns a number
    of bytes, with which this thread calls `on_progress`. After an error no more work is begun; it
    is raised when the threads have ended.
    """
    threads = min((os.cpu_count() or 1) // max(1, get_local_world_size()), _MOST_THREADS)
    if count <= _FEW_PARTS or threads < 2:
        for number in range(count):
            on_progress(work(number))
        return
    failed = threading.Event()

    def work_unless_failed(number: int) -> int:
        try:
            return 0 if failed.is_set() else work(number)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="syncprims-load") as pool:
        for done in pool.map(work_unless_failed, range(count)):
            on_progress(done)


class _Entry(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  #: in the file
    end: int


class SafetensorsFile:
    """An open file of tensors whose header has been checked. The caller closes it.

    :raises CheckpointError: if it cannot be read, or its header is not as it was written.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path = path
        with reading(path):
            self._file = filesystem.ExistingFile(path, follow=follow)
        self.size = self._file.size
        try:
            with reading(path):
                header = self._read_header()
            fields = parse(path, header)
            found = fields.pop(METADATA, {})
            if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
                raise refusal(path, "wrong header", "metadata of texts", repr(found))
            self.metadata: dict[str, str] = found
            #: of the header; empty if another program wrote the file
            self.digest = check_digest(path, header, METADATA) if has_digest(header, _DATA) else ""
            self._begin = _LENGTH.size + len(header)
            self.entries = {name: self._parse_entry(name, entry) for name, entry in fields.items()}
            self._check_coverage()
            self._read_pairs_as_complex()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check_data(
        self,
        on_progress: Callable[[int], object],
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Compare the data with their digest, if the file has one.

        What is read on the way is left in the tensors `into`, as :meth:`read_into` does: if this
        raises, they hold anything. Everything else needs a megabyte of memory for each thread.

        :raises CheckpointError: if the data are not what was written.
        """
        if not self.digest:
            if into:
                self.read_into(into.items(), on_progress)
            return
        chunks = self._pieces_by_chunk(into or {})
        digests = [b""] * len(chunks)
        local = threading.local()

        def hash_chunk(number: int) -> int:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(_READ_SIZE))
            hashed, size = xxhash.xxh3_128(), 0
            for start, end, memory in chunks[number]:
                for at in range(start, end, _READ_SIZE):
                    stop = min(at + _READ_SIZE, end)
                    place: memoryview = local.buffer if memory is None else memory[at - start :]
                    some = place[: stop - at]
                    self._file.read_into(some, at)
                    hashed.update(some)
                size += end - start
            digests[number] = hashed.digest()
            return size

        with reading(self.path):
            run_parallel(hash_chunk, len(digests), on_progress)
        expected = self.metadata.get(_DATA, "")
        found = xxhash.xxh3_128_hexdigest(b"".join(digests))
        if found != expected:
            raise refusal(self.path, "damaged data", f"the digest {expected}", found)

    def _pieces_by_chunk(
        self, into: Mapping[str, torch.Tensor]
    ) -> list[list[tuple[int, int, memoryview | None]]]:
        """Return the pieces of each chunk of the data: begin, end, and the memory of a tensor."""
        chunks: list[list[tuple[int, int, memoryview | None]]] = [
            [] for _ in range(-(-(self.size - self._begin) // CHUNK))
        ]
        done = self._begin

        def add(end: int, memory: memoryview | None) -> None:
            nonlocal done
            begin = done
            while done < end:
                number = (done - self._begin) // CHUNK
                stop = min(end, self._begin + (number + 1) * CHUNK)
                part = None if memory is None else memory[done - begin : stop - begin]
                chunks[number].append((done, stop, part))
                done = stop

        places = ((self.entries[name], tensor) for name, tensor in into.items() if tensor.numel())
        for entry, tensor in sorted(places, key=lambda place: place[0].start):
            add(entry.start, None)
            add(entry.end, _bytes_of(tensor))
        add(self.size, None)
        return chunks

    def read_into(
        self,
        targets: Iterable[tuple[str, torch.Tensor]],
        on_progress: Callable[[int], object] = _ignore,
    ) -> None:
        """Read tensors, by name, into others of the same dtype and size, contiguous, on the CPU.

        :raises CheckpointError: if they cannot be read, or the file was changed meanwhile.
        """
        parts: list[tuple[memoryview, int]] = []
        for name, target in targets:
            if target.numel():
                memory, begin = _bytes_of(target), self.entries[name].start
                starts = range(0, len(memory), filesystem.CHUNK)
                parts += [(memory[at : at + filesystem.CHUNK], begin + at) for at in starts]

        def read_part(number: int) -> int:
            buffer, start = parts[number]
            self._file.read_into(buffer, start)
            return len(buffer)

        with reading(self.path):
            run_parallel(read_part, len(parts), on_progress)
            self._file.check_unchanged()

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own.

        :raises CheckpointError: as :meth:`read_into`.
        """
        dtype, shape, _, _ = self.entries[name]
        found = in_huge_pages(torch.empty(shape, dtype=dtype, device="cpu"))
        self.read_into([(name, found)])
        return found

    def _read_header(self) -> bytes:
        if self.size < _LENGTH.size:
            raise refusal(self.path, "cut off", "at least 8 bytes", f"{self.size}")
        (length,) = _LENGTH.unpack(self._file.read(0, _LENGTH.size))
        most = min(_LONGEST_HEADER, self.size - _LENGTH.size)
        if length > most:
            what = "wrong header length, or cut off"
            raise refusal(self.path, what, f"at most {most} bytes of header", f"{length}")
        return self._file.read(_LENGTH.size, length)

    def _parse_entry(self, name: str, entry: Any) -> _Entry:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise refusal(self.path, f"wrong entry {name!r}", "dtype, shape, data_offsets", entry)
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(code) if isinstance(code, str) else None
        if dtype is None:
            raise refusal(self.path, f"dtype of {name!r}", f"one of {sorted(_DTYPES)}", repr(code))
        if not _are_sizes(shape) or len(shape) > 64:
            raise refusal(self.path, f"shape of {name!r}", "a list of sizes", repr(shape))
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise refusal(self.path, f"position of {name!r}", "[start, end]", repr(offsets))
        start, end = offsets
        needed = dtype.itemsize * math.prod(shape)
        # A zero in a shape can hide other sizes that no tensor may have.
        if end - start != needed or any(length > 1 << 62 for length in shape):
            what = f"size of {name!r}"
            raise refusal(self.path, what, f"{needed} bytes for {dtype} {shape}", f"{end - start}")
        return _Entry(dtype, tuple(shape), self._begin + start, self._begin + end)

    def _check_coverage(self) -> None:
        """Raise unless the tensors cover the data exactly: no gap, no overlap, nothing after."""
        at = self._begin
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            if entry.start != at:
                what = f"position of {name!r}"
                raise refusal(self.path, what, f"byte {at} of the file", f"byte {entry.start}")
            at = entry.end
        if at != self.size:
            raise refusal(self.path, "wrong size, or cut off", f"{at} bytes", f"{self.size}")

    def _read_pairs_as_complex(self) -> None:
        """Make complex tensors of those that are stored as pairs of float64."""
        if _COMPLEX not in self.metadata or not self.digest:
            return
        listed = parse(self.path, b'{"names":%s}' % self.metadata[_COMPLEX].encode())["names"]
        for name in set(listed):
            entry = self.entries.get(name)
            if entry is None or entry.dtype != torch.float64 or entry.shape[-1:] != (2,):
                raise refusal(self.path, f"complex tensor {name!r}", "pairs of float64", entry)
            self.entries[name] = entry._replace(dtype=torch.complex128, shape=entry.shape[:-1])


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)


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
