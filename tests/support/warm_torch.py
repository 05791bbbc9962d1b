"""Torch, ready for forked ranks: imported whole, and without threads that a child would lack."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports a lot: once, and not in every child
