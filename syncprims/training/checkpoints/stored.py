"""Tensors that are still in their file: its header proved, its data to be proved and read.

Format: https://github.com/huggingface/safetensors (README, "Format").
"""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import disk
from .pieces import digest_of
from .refusal import reading, refusal
from .seal import check, is_ours, parse
from .tensorfile import CODES, COMPLEX, DATA, LONGEST_HEADER, META, WORD, bytes_of
from .threads import share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_ENTRY = {"dtype", "shape", "data_offsets"}


class Entry(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  #: in the file
    end: int


class TensorFile:
    """A file of tensors that is open, its header proved. To be closed.

    :raises CheckpointError: if it cannot be read, or its header is not as it was written.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path = path
        with reading(path):
            self._file = disk.OldFile(path, follow=follow)
        try:
            self._begin_reading()
        except BaseException:
            self.close()
            raise

    def _begin_reading(self) -> None:
        path, self.size = self.path, self._file.size
        with reading(path):
            header = self._header()
        fields = parse(path, header)
        self.metadata = self._metadata(fields.pop(META, {}))
        #: of its header; empty if somebody else wrote the file
        self.seal = check(path, header, META) if is_ours(header, DATA) else ""
        self._begin = WORD.size + len(header)
        self.entries = {name: self._entry(name, entry) for name, entry in fields.items()}
        self._check_cover()
        self._pairs = self._complex_names()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def prove(self, tell: Callable[[int], object] = lambda done: None) -> None:
        """Compare the data with their digest, if the file has one.

        :raises CheckpointError: if they are not what was written.
        """
        if not self.seal:
            return
        expected = self.metadata.get(DATA, "")

        def read(room: memoryview, start: int) -> None:
            self._file.read_into(room, self._begin + start)

        with reading(self.path):
            found = digest_of(self.size - self._begin, read, tell)
        if found != expected:
            raise refusal(self.path, "damaged data", f"the digest {expected}", found)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all tensors, which stay in the file for now."""
        return {name: StoredTensor(self, name) for name in self.entries}

    def fill(
        self,
        targets: Iterable[tuple[str, torch.Tensor]],
        tell: Callable[[int], object] = lambda done: None,
    ) -> None:
        """Read tensors, by name, into others of the same dtype and size, contiguous, on the CPU.

        :raises CheckpointError: if they cannot be read, or are not what was proved any more.
        """
        parts: list[tuple[memoryview, int]] = []
        for name, target in targets:
            if target.numel():
                room, begin = bytes_of(target), self.entries[name].start
                some = range(0, len(room), disk.PIECE)
                parts += [(room[at : at + disk.PIECE], begin + at) for at in some]

        def one(number: int) -> int:
            room, start = parts[number]
            self._file.read_into(room, start)
            return len(room)

        with reading(self.path):
            share(one, len(parts), tell)
            self._file.check_unchanged()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in memory of its own.

        :raises CheckpointError: as :meth:`fill`.
        """
        dtype, shape, _, _ = self.entries[name]
        found = torch.empty(shape, dtype=dtype, device="cpu")
        self.fill([(name, found)])
        return torch.view_as_complex(found) if name in self._pairs else found

    def look(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        entry = self.entries[name]
        if name in self._pairs:
            return torch.complex128, entry.shape[:-1]
        return entry.dtype, entry.shape

    def _header(self) -> bytes:
        size = self.size
        if size < WORD.size:
            raise refusal(self.path, "cut off", "at least 8 bytes", f"{size}")
        (length,) = WORD.unpack(self._file.read(0, WORD.size))
        most = min(LONGEST_HEADER, size - WORD.size)
        if length > most:
            what = "wrong header length, or cut off"
            raise refusal(self.path, what, f"at most {most} bytes of header", f"{length}")
        return self._file.read(WORD.size, length)

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


class StoredTensor:
    """A tensor of a checkpoint that is still in its file."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self.file = file
        self.name = name  #: in the file
        self.dtype, self.shape = file.look(name)

    def tensor(self) -> torch.Tensor:
        """Return it in memory of its own.

        :raises CheckpointError: if it cannot be read.
        """
        return self.file.tensor(self.name)


class HeldTensor:
    """A tensor of a checkpoint that is in memory already, as those of torch's own files."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held
        self.dtype, self.shape = held.dtype, tuple(held.shape)

    def tensor(self) -> torch.Tensor:
        """Return it."""
        return self._held
