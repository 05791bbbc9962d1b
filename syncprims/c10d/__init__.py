"""``torch.distributed`` on this library: a c10d backend whose collectives are rounds at a board.

    import syncprims.c10d
    torch.distributed.init_process_group("syncprims")

The import registers the backend. Where the package is installed, torch registers it by itself.
A call that differs between ranks, a rank that does not come and one that dies raise the errors of
:mod:`syncprims` on every rank, with the user's line. Collectives finish inside the call, also with
``async_op=True``: nothing overlaps. CUDA tensors pass through the hosts' memory.
"""

from __future__ import annotations

from importlib.util import find_spec

from syncprims.errors import install as _install

if find_spec("torch") is None:
    raise ImportError(f"syncprims.c10d needs torch: {_install('torch')}")

import torch as torch  # before ours: it may call `register`, which imports modules of this package

from _syncprims_c10d import register

from .group_world import open_default_group
from .process_group import SyncProcessGroup
from .torch_internals import NAME, adapt_torch, serve_every_backend

__all__ = ["NAME", "SyncProcessGroup", "open_default_group", "serve_every_backend"]

register()
adapt_torch(SyncProcessGroup)
