"""Put a model's parameters on other devices, or into another dtype, before weights come in."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def place(
    model: nn.Module, names: Collection[str], device_map: Any, dtype: torch.dtype | str | None
) -> None:
    """Put the parameters and buffers of these names where the map says, in that dtype.

    Ties hold: what was one parameter still is. On the meta device, where there are no values,
    parameters are made anew, and so optimizers must be made afterwards.

    :raises ValueError: for a dtype or a device that cannot be used.
    """
    kind = _dtype(dtype)
    table = _device_table(device_map)
    made: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table_of in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in list(table_of.items()):
                full = f"{path}.{name}" if path else name
                if tensor is None or full not in names:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _moved(tensor, _device(table, full), kind)
                table_of[name] = made[id(tensor)]  # pyright: ignore[reportArgumentType]


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
    if device_map is None:
        return {}
    table: Mapping[str, Any] = device_map if hasattr(device_map, "items") else {"": device_map}
    for name, device in table.items():
        if device in ("disk", "meta", "auto", "balanced", "sequential"):
            raise ValueError(
                f"device_map gives {device!r} for {name!r}: it takes devices that hold tensors, as "
                f"'cpu', 0 or 'cuda:1'; nothing is offloaded here"
            )
    return {name: torch.device(device) for name, device in table.items()}


def _device(table: Mapping[str, torch.device], name: str) -> torch.device | None:
    """Return the device of the longest beginning of `name` in the map."""
    found = ""
    for start in table:
        if (start == "" or name == start or name.startswith(f"{start}.")) and len(start) >= len(
            found
        ):
            found = start
    return table.get(found)
