"""Torch's own files, ``.bin``: written when the user asks for them, read without running code."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from . import disk
from .refusal import reading, refusal
from .tensorfile import Written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Stream:
    """What `torch.save` writes to: digested on its way to the disk."""

    def __init__(self, file: disk.NewFile, tell: Callable[[int], object]) -> None:
        self._file = file
        self._tell = tell
        self.hashed = xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            raw = view.cast("B")
            try:
                self._file.write(raw)
            except OSError as error:  # torch makes another error of it
                self.error = error
                raise
            self.hashed.update(raw)
            self.size += len(raw)
            self._tell(len(raw))
            return len(raw)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


def write(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    ties: Mapping[str, str],
    tell: Callable[[int], object],
) -> Written:
    """Make the file `path` hold these tensors, tied ones under all their names; sync it."""
    own = {name: _own_storage(tensor.detach()) for name, tensor in tensors.items()}
    return write_any(path, {**own, **{other: own[name] for other, name in ties.items()}}, tell)


def write_any(path: str, obj: Any, tell: Callable[[int], object] = lambda done: None) -> Written:
    """Make the file `path` hold what `torch.save` makes of `obj`; return when the disk has it."""
    file = disk.NewFile(path)
    stream = _Stream(file, tell)
    try:
        torch.save(obj, stream)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        file.finish()
    except BaseException:
        if stream.error is not None:
            raise stream.error from None
        raise
    finally:
        file.abandon()
    return Written(stream.size, stream.hashed.hexdigest())


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage is no larger than itself: all of that would be saved."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def _digest(file: disk.OldFile) -> str:
    hashed, room = xxhash.xxh3_128(), memoryview(bytearray(1 << 20))
    for start in range(0, file.size, len(room)):
        some = room[: file.size - start]
        file.read_into(some, start)
        hashed.update(some)
    return hashed.hexdigest()


def read(path: str, written: Written | None, *, follow: bool) -> dict[str, torch.Tensor]:
    """Return the tensors in one of torch's files, and run none of the code that it may hold.

    :raises CheckpointError: if it cannot be read, needs code, or is not the file `written`.
    """
    with reading(path), contextlib.closing(disk.OldFile(path, follow=follow)) as file:
        zipped = file.read(0, min(4, file.size)) == b"PK\x03\x04"
        found = Written(file.size, "" if written is None else _digest(file))
    if written is not None and found != written:
        raise refusal(path, "not what was written", str(written), str(found))
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch says many things of a file that it cannot read
        first = str(error).strip().split("\n", 1)[0]
        raise refusal(path, "not a weights file", "tensors, and no code", first) from error
    if not isinstance(state, dict):
        raise refusal(path, "not a weights file", "a dict of tensors", type(state).__name__)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise refusal(path, f"entry {name!r}", "a tensor under a name", kind)
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise refusal(path, f"tensor {name!r}", "a dense tensor", str(tensor.layout))
        with contextlib.suppress(RuntimeError):
            tensor = tensor.detach()
        tensors[name] = tensor
    return tensors
