"""Load a model's weights, ours or others': proved first, and only then brought in."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from syncprims import CheckpointError

from . import disk, torchfile
from .meter import metered
from .placing import place
from .refusal import reading, refusal
from .savemodel import FILES
from .seal import SEAL, check, is_ours, parse
from .sharded import cut, is_sharded
from .tensorfile import COMPLEX, DATA, TensorFile, Written
from .together import log
from .weightfiles import FIRST_FILES
from .weights import portable, unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

_INDEX = ".index.json"
_LONGEST_INDEX = 512 << 20  # bytes
_OURS = {SEAL, DATA, COMPLEX, "format"}


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | int | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
    *,
    allow_links: bool = False,
) -> None:
    """Bring the weights of a checkpoint into the model, after they have been proved whole.

    `checkpoint` is a weights file, an index, or a directory with one. `device_map` gives the device
    for each part of the model by the beginning of its name (``""`` is all), or one for all; `dtype`
    another type for its floating-point tensors. Parameters on the meta device come to be where the
    map says, else on the CPU. Without `strict`, tensors that are missing or not known to the model
    are reported and left. Symbolic links, as in the cache of a hub, are followed only with
    `allow_links`. Every rank that calls it reads for itself.

    :raises CheckpointError: naming the file, what was expected and what was found; then the model
        is as it was.
    :raises ValueError: if `device_map` names a device that cannot hold tensors.
    """
    path = os.fspath(checkpoint)
    weights = read_weights(path, follow=allow_links)
    bring_in(model, weights, path, device_map, dtype, strict)


def read_weights(path: str, *, follow: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a weights file, index or directory, proved.

    Those of safetensors files lie in the mapped file, so they take no memory until they are read.

    :raises CheckpointError: if anything is not as it was written.
    """
    if disk.is_directory(path):
        path = _first_file(path)
    if path.endswith(_INDEX):
        return _read_shards(path, follow)
    return _read_file(path, None, follow)


def _first_file(directory: str) -> str:
    found = disk.names(directory)
    for name in FIRST_FILES:
        if name in found:
            return f"{directory}/{name}"
    others = [name for name in found if name.endswith(_INDEX)]
    if len(others) == 1:
        return f"{directory}/{others[0]}"
    expected = f"one of {', '.join(FIRST_FILES)}"
    raise refusal(directory, "no model in it", expected, ", ".join(found) or "nothing")


def _read_file(path: str, written: Written | None, follow: bool) -> dict[str, torch.Tensor]:
    if not path.endswith(".safetensors"):
        return torchfile.read(path, written, follow=follow)
    file = TensorFile(path, follow=follow)
    if written is not None:
        written.same_as(path, file)
    with metered("checking weights", file.size) as meter:
        file.prove(meter)
    tensors = {name: file.tensor(name) for name in file.entries}
    for other, name in file.metadata.items():  # tied: as the safetensors library notes it, too
        if other not in _OURS and other not in tensors and name in tensors:
            tensors[other] = tensors[name]
    return tensors


def _read_shards(path: str, follow: bool) -> dict[str, torch.Tensor]:
    with reading(path):
        data = disk.read_small(path, _LONGEST_INDEX, follow=follow)
    index = parse(path, data)
    placed, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(placed, dict):
        raise refusal(path, "not an index", "metadata and weight_map", ", ".join(index))
    written: dict[str, Written] = {}
    if is_ours(data, FILES):
        check(path, data, "metadata")
        written = _written(path, metadata.get(FILES))
    by_file: dict[str, list[str]] = {}
    for name, file in placed.items():
        by_file.setdefault(plain_name(path, file), []).append(name)
    if written and written.keys() != by_file.keys():
        raise refusal(path, "files", ", ".join(sorted(written)), ", ".join(sorted(by_file)))
    tensors: dict[str, torch.Tensor] = {}
    directory = os.path.dirname(path) or os.curdir  # noqa: PTH120
    for file, names in by_file.items():
        found = _read_file(f"{directory}/{file}", written.get(file), follow)
        lacking = [name for name in names if name not in found]
        if lacking:
            raise refusal(f"{directory}/{file}", "tensors", ", ".join(lacking), "none of these")
        listed = set(names)
        # What the index does not list is tied to what it lists, or not meant.
        ties = {n: t for n, t in found.items() if n not in placed}
        tensors.update({name: found[name] for name in listed})
        tensors.update({n: t for n, t in ties.items() if _tied(t, found, listed)})
    return tensors


def _tied(tensor: torch.Tensor, found: dict[str, torch.Tensor], listed: set[str]) -> bool:
    return any(found[name] is tensor for name in listed)


def _written(path: str, found: Any) -> dict[str, Written]:
    try:
        return {plain_name(path, file): Written(*facts) for file, facts in found.items()}
    except (AttributeError, TypeError) as error:
        raise refusal(path, "list of files", "size and seal of each", repr(found)) from error


def plain_name(path: str, name: Any) -> str:
    """Return a file's name, as a file that others wrote gives it.

    :raises CheckpointError: if it could lead out of the directory.
    """
    bad = not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name
    if bad or "\\" in name:
        raise refusal(path, "a file's name", "a name in the same directory", repr(name))
    return name  # type: ignore[no-any-return]


def bring_in(
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    path: str,
    device_map: Any = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
) -> None:
    """Bring these tensors into a model. See :func:`load_checkpoint_in_model`."""
    inner = unwrapped(model)
    own: dict[str, Any] = inner.state_dict(keep_vars=True)
    state, missing, unexpected = _matched(own, weights)
    if (missing or unexpected) and strict and not _renames(inner):
        expected = f"the model's {len(own)} tensors"
        found = f"{_listed('missing', missing)}{_listed('not in the model', unexpected)}"
        raise refusal(path, "another model", expected, found.strip("; "))
    for name, tensor in state.items():
        target = own.get(name)
        if isinstance(target, torch.Tensor) and target.shape != tensor.shape:
            what = f"shape of {name!r}"
            raise refusal(
                path, what, f"{tuple(target.shape)}, the model's", str(tuple(tensor.shape))
            )
    if missing or unexpected:
        log().warning("%s: %s%s", path, _listed("missing", missing), _listed("unused", unexpected))
    place(inner, state, device_map, dtype)
    own = inner.state_dict(keep_vars=True)
    state = {
        name: cut(tensor, own[name]) if is_sharded(own.get(name)) else tensor
        for name, tensor in state.items()
    }
    try:
        inner.load_state_dict(state, strict=strict and not missing)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the model refuses it: {error}", path=path) from error


def _matched(
    own: dict[str, Any], weights: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """Return the weights under the model's names, the names that are missing, and those unused."""
    names = {portable(name): name for name in own}
    state = {names.get(name, name): tensor for name, tensor in weights.items()}
    unexpected = [name for name in state if name not in own]
    there = {id(own[name]): state[name] for name in state if name in own}
    missing: list[str] = []
    for name, tensor in own.items():
        if name in state or not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) in there:  # tied in the model to one that is there
            state[name] = there[id(tensor)]
        else:
            missing.append(name)
    return state, missing, unexpected


def _renames(model: nn.Module) -> bool:
    """Tell whether a part of the model looks at names by itself when it is loaded."""
    return any(
        module._load_state_dict_pre_hooks  # pyright: ignore[reportPrivateUsage]
        for module in model.modules()
    )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what}: {', '.join(names[:5])}{more}; "
