"""Import torch completely before ranks fork, and without threads."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
torch.optim.SGD(
    [torch.zeros(1)], lr=1.0
)  # imports many modules; imported once here, not in every child
