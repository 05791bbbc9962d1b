"""What kind of value is this? Asked without importing numpy or torch."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Tell whether `value` is a dict."""
    return isinstance(value, dict)


def is_list_or_tuple(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Tell whether `value` is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_array(value: object) -> bool:
    """Tell whether `value` is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_scalar(value: object) -> bool:
    """Tell whether `value` is a numpy number."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.number | numpy.bool_)


def is_tensor(value: object) -> bool:
    """Tell whether `value` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_number(value: object) -> bool:
    """Tell whether `value` is a number, of Python's or of numpy's."""
    return isinstance(value, int | float | complex) or is_scalar(value)
