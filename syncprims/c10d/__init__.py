"""``torch.distributed`` served by syncprims."""

from __future__ import annotations

NAME = "syncprims"
