"""One object in a file of its own, written by the rank that calls: whole or not at all."""

# Torch is typed in part, and what a user hands over may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch

from syncprims import CheckpointError

from . import disk, tensorfile, torchfile
from .together import STANDS, Outcome, settle
from .weightfiles import is_temporary, names_or_report, remove_or_report, temporary, unique

if TYPE_CHECKING:
    from collections.abc import Mapping


def save_object(obj: Any, path: str | os.PathLike[str], *, safe: bool) -> None:
    """Make `obj` the content of the file `path`, durably; not collective.

    With `safe` it is a dict of tensors, and the file one of safetensors; else torch's own. Where
    the path is a link, that stays, and what it leads to gets the content.

    :raises CheckpointError: naming path and errno; what was there before still stands, unless it
        says otherwise.
    :raises TypeError: if `path` is neither a str nor a path.
    """
    given = os.fspath(cast("Any", path))
    if not isinstance(given, str):
        raise TypeError(f"f={path!r}: it takes a str, a path or an opened file")
    target = disk.absolute(given)
    outcome = Outcome.of(lambda: _save(obj, target, safe), lambda _: None)
    settle(f"save to {target}", outcome, [outcome.plain], STANDS)


def _save(obj: Any, target: str, safe: bool) -> None:
    target = disk.replaceable(target)
    folder, name = os.path.split(target)
    waiting = f"{folder}/{temporary(name, unique())}"
    try:
        if safe:
            tensorfile.write(waiting, _storable(obj), {})
        else:
            torchfile.write_any(waiting, obj)
        disk.rename(waiting, target)
    except BaseException:
        remove_or_report(waiting)
        raise
    try:
        disk.sync_directory(folder)
    except OSError as error:
        raise CheckpointError(
            f"the new file is in place, but may not outlive a loss of power: {error}",
            path=error.filename, errno=error.errno,
        ) from error  # fmt: skip
    for found in names_or_report(folder):
        if is_temporary(found, name):  # a killed save has left it
            remove_or_report(f"{folder}/{found}")


def _storable(obj: Any) -> Mapping[str, torch.Tensor]:
    """Return `obj`, if a safetensors file can hold it."""
    if not isinstance(obj, dict):
        raise TypeError(f"safetensors files hold a dict of tensors, and this is {type(obj)}")
    for name, tensor in obj.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"safetensors files hold tensors by name, and {name!r} is {type(tensor)}"
            )
        if name == tensorfile.META:
            raise TypeError(f"{name!r} is the name of a safetensors file's own part")
        tensorfile.check_storable(name, tensor)
    return obj
