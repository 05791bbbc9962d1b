"""The commit protocol of every save: temporary names, and the one step that replaces old by new.

Nothing is written to a file that a reader may be reading. New files get unused or temporary names
and are synced. One rename, or one removal, makes them current. Only then are old files removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import TYPE_CHECKING, Any

from syncprims import CheckpointError

from . import filesystem
from .coordination import UNCHANGED, coordinate
from .dtensor import full_tensor
from .progress import progress_bar
from .safetensors_file import FileRecord, byte_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from .coordination import Team
    from .save_plan import PlannedFile

_TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9a-f]{16}")


def write_files(
    folder: str,
    files: Sequence[PlannedFile],
    index: int,
    doing: str,
    write: Callable[[str, Mapping[str, torch.Tensor], Callable[[int], object]], FileRecord],
    *,
    quiet: bool = False,
) -> dict[str, list[Any]]:
    """Write the files of the rank of this index; return the file record of each. Shows progress.

    Collective if there are DTensors in a file: every rank passes all files, and takes part in
    gathering them, also after an error of its own.
    """
    written: dict[str, list[Any]] = {}
    failure: Exception | None = None
    size = sum(byte_size(file.tensors.values()) for file in files if file.writer == index)
    with progress_bar(doing, size, quiet=quiet) as add:
        for name, writer, tensors in files:
            gathered = {key: full_tensor(tensor) for key, tensor in tensors.items()}
            if writer == index and failure is None:
                try:
                    written[name] = list(write(f"{folder}/{name}", gathered, add))
                except Exception as error:
                    failure = error
    if failure is not None:
        raise failure
    return written


def write_and_commit(
    doing: str,
    team: Team,
    write: Callable[[], dict[str, list[Any]]],
    commit: Callable[[dict[str, FileRecord]], object],
    clean_up: Callable[[], object],
) -> None:
    """Call ``write()`` on every rank, and then ``commit(records)`` on the leading rank.

    ``write()`` returns the record of each file that it has written. If it fails on any rank,
    ``clean_up()`` is called on all.

    :raises CheckpointError: the same on all ranks, if one of them fails.
    """
    try:
        written = coordinate(doing, write, advice=UNCHANGED).by_rank
    except BaseException:
        clean_up()
        raise
    coordinate(
        doing, lambda: commit(merge_records(written)) if team.leads else None, lambda _: None,
        advice=UNCHANGED,
    )  # fmt: skip


def merge_records(written: Sequence[dict[str, list[Any]]]) -> dict[str, FileRecord]:
    """Return the records of the files that all ranks have written."""
    return {name: FileRecord(*facts) for some in written for name, facts in some.items()}


def commit(
    what: str,
    prepare: Callable[[], str | None],
    source: str,
    target: str,
    undo: Callable[[], object],
) -> None:
    """Call ``prepare()``, then replace `target` by `source` in one durable step.

    The step is the rename. If ``prepare()`` returns a file that readers prefer to `target`, the
    step is the removal of that file after the rename. If anything fails before the step,
    ``undo()`` removes what was made.

    :raises CheckpointError: if the new `what` is in place, but the directory cannot be synced.
    :raises OSError: if anything fails before the step.
    """
    directory = os.path.dirname(target)  # noqa: PTH120
    prepared, preferred = False, None
    try:
        preferred = prepare()
        prepared = True
        filesystem.rename(source, target)
        filesystem.sync_directory(directory)
        if preferred is not None:
            filesystem.remove(preferred)
            filesystem.sync_directory(directory)
    except BaseException as error:
        # Look at the files, not at the error: a network file system may lose the answer to a call
        # that succeeded, and a signal handler may raise right after one.
        if not prepared or not _is_gone(preferred or source):
            if prepared and preferred and _is_gone(source):
                filesystem.remove_or_log(target)
            undo()
        elif isinstance(error, OSError):
            raise CheckpointError(
                f"the new {what} is in place, but may not survive a power loss: {error}",
                path=error.filename, errno=error.errno,
            ) from error  # fmt: skip
        raise


def _is_gone(path: str) -> bool:
    with contextlib.suppress(OSError):
        return not filesystem.exists(path)
    return True  # not known: then nothing is removed


def versioned(name: str, version: int) -> str:
    """Return ``model.v2.safetensors`` for the second version of ``model.safetensors``."""
    if version == 1:
        return name
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.v{version}{dot}{ending}"


def unused_version(names: Iterable[str], taken: Sequence[str]) -> int:
    """Return the lowest version in which none of `names` is taken."""
    version, used, names = 1, set(taken), list(names)
    while any(versioned(name, version) in used for name in names):
        version += 1
    return version


def new_token() -> str:
    """Return a unique text for temporary names. It does not change Python's random numbers."""
    return secrets.token_hex(8)


def temporary(name: str, token: str) -> str:
    """Return the temporary name of what will be called `name`."""
    return f".{name}.tmp-{token}"


def is_temporary(found: str, name: str) -> bool:
    """Return whether `found` is a temporary of `name`. Only a killed save leaves one."""
    match = _TEMPORARY.fullmatch(found)
    return match is not None and match[1] == name
