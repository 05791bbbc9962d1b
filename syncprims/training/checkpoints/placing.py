"""Put a model's parameters on other devices, or into another dtype, before weights come in."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .weights import portable

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence


def place(
    model: nn.Module, names: Collection[str], device_map: Any, dtype: torch.dtype | str | None
) -> None:
    """Put the parameters and buffers of these names where the map says, in that dtype.

    Ties hold: what was one parameter still is. On the meta device, where there are no values,
    parameters are made anew, and so optimizers must be made afterwards.

    :raises ValueError: for a dtype or a device that cannot be used, or a map that says of some of
        them nothing; then all are where they were.
    """
    kind = _dtype(dtype)
    slots = [slot for slot in _slots(model) if slot.full in names]
    devices = {} if device_map is None else _devices(_device_table(device_map), slots)
    made: dict[int, torch.Tensor] = {}
    for _, table, name, tensor, _ in slots:
        if id(tensor) not in made:
            made[id(tensor)] = _moved(tensor, devices.get(id(tensor)), kind)
        table[name] = made[id(tensor)]


def without_values(model: nn.Module) -> list[str]:
    """Return the buffers on the meta device that a model does not save, and nobody can load."""
    return [
        slot.full
        for slot in _slots(model)
        if slot.tensor.is_meta and slot.name in slot.module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    ]


class _Slot(NamedTuple):
    """Where a module has a parameter or a buffer."""

    module: nn.Module
    table: dict[str, Any]  #: of the module's
    name: str
    tensor: torch.Tensor
    full: str  #: its name in the model


def _slots(model: nn.Module) -> Generator[_Slot]:
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in table.items():
                if tensor is not None:
                    yield _Slot(module, table, name, tensor, f"{path}.{name}" if path else name)


def _devices(table: Mapping[str, torch.device], slots: Sequence[_Slot]) -> dict[int, torch.device]:
    """Return the device of each tensor by its identity: that of the first name the map covers."""
    found: dict[int, torch.device] = {}
    for slot in slots:
        device = _device(table, portable(slot.full))
        if device is not None:
            found.setdefault(id(slot.tensor), device)
    lacking = [slot.full for slot in slots if id(slot.tensor) not in found]
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise ValueError(
            f"device_map gives no device for {', '.join(lacking[:5])}{more}: name the parts that "
            f"hold them, or all others by ''"
        )
    return found


def _moved(
    tensor: torch.Tensor, device: torch.device | None, kind: torch.dtype | None
) -> torch.Tensor:
    kind = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta:
        made = torch.empty_like(tensor, device=device or "cpu", dtype=kind)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made
    device = device or tensor.device
    if tensor.device != device or tensor.dtype != kind:
        tensor.data = tensor.data.to(device, kind)
    return tensor


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype={dtype!r}: torch has no such type")
        return found
    return dtype


def _device_table(device_map: Any) -> Mapping[str, torch.device]:
    table: Mapping[str, Any] = device_map if hasattr(device_map, "items") else {"": device_map}
    for name, device in table.items():
        if device in ("disk", "meta", "auto", "balanced", "sequential"):
            raise ValueError(
                f"device_map gives {device!r} for {name!r}: it takes devices that hold tensors, as "
                f"'cpu', 0 or 'cuda:1'; nothing is offloaded here"
            )
    return {portable(name): torch.device(device) for name, device in table.items()}


def _device(table: Mapping[str, torch.device], name: str) -> torch.device | None:
    """Return the device of the longest beginning of `name` in the map."""
    found = ""
    for start in table:
        if (start == "" or name == start or name.startswith(f"{start}.")) and len(start) >= len(
            found
        ):
            found = start
    return table.get(found)
