"""What both loops train on."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_dataset(items: int = 24) -> TensorDataset:
    """Return points of a plane, with a bit of noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(items, 3, generator=generator)
    noise = 0.01 * torch.randn(items, 1, generator=generator)
    return TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5]]) + noise)


def make_model() -> nn.Module:
    """Return a model with the same parameters in each call."""
    torch.manual_seed(0)
    return nn.Linear(3, 1)
