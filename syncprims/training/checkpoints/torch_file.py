"""Torch's own files, ``.bin``: written when the user asks for them, read without running code."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from . import filesystem
from .integrity import reading, refusal
from .safetensors_file import FileRecord, byte_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Stream:
    """The stream that `torch.save` writes to: it hashes the data on their way to the file."""

    def __init__(self, file: filesystem.NewFile, on_progress: Callable[[int], object]) -> None:
        self._file = file
        self._on_progress = on_progress
        self.hashed = xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            raw = view.cast("B")
            try:
                self._file.write(raw)
            except OSError as error:  # torch raises another error instead
                self.error = error
                raise
            self.hashed.update(raw)
            self.size += len(raw)
            self._on_progress(len(raw))
            return len(raw)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def write_torch(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    ties: Mapping[str, str],
    on_progress: Callable[[int], object],
) -> FileRecord:
    """Write these tensors, tied ones under all their names, to the new file `path`, and sync it."""
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # Torch saves the whole storage: it must not be larger than the tensor.
        whole = tensor.untyped_storage().nbytes() == byte_size([tensor])
        own[name] = tensor.detach() if whole else tensor.detach().clone()
    own |= {other: own[name] for other, name in ties.items()}
    return write_torch_object(path, own, on_progress)


def write_torch_object(
    path: str, obj: Any, on_progress: Callable[[int], object] = lambda done: None
) -> FileRecord:
    """Write what `torch.save` makes of `obj` to the new file `path`, and sync it."""
    with contextlib.closing(filesystem.NewFile(path)) as file:
        stream = _Stream(file, on_progress)
        try:
            torch.save(obj, stream)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        except BaseException:
            if stream.error is not None:
                raise stream.error from None
            raise
        file.finish()
    return FileRecord(stream.size, stream.hashed.hexdigest())


def _digest(file: filesystem.ExistingFile) -> str:
    hashed, buffer = xxhash.xxh3_128(), memoryview(bytearray(1 << 20))
    for start in range(0, file.size, len(buffer)):
        some = buffer[: file.size - start]
        file.read_into(some, start)
        hashed.update(some)
    return hashed.hexdigest()


def read_torch(path: str, record: FileRecord | None, *, follow: bool) -> dict[str, torch.Tensor]:
    """Return the tensors in one of torch's files. No code in it is run.

    :raises CheckpointError: if it cannot be read, needs code, or is not the file of `record`.
    """
    with reading(path), contextlib.closing(filesystem.ExistingFile(path, follow=follow)) as file:
        zipped = file.read(0, min(4, file.size)) == b"PK\x03\x04"
        found = FileRecord(file.size, "" if record is None else _digest(file))
    if record is not None and found != record:
        raise refusal(path, "not what was written", str(tuple(record)), str(tuple(found)))
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch raises many kinds of errors
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
