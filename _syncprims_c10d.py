"""What torch loads when it is imported, by the entry point group ``torch.backends``.

It registers the c10d backend ``syncprims`` without importing the library, which every program that
imports torch would have to wait for. A process group of that backend imports it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

_NAME = "syncprims"
_serving = contextlib.ExitStack()  # never closed: for as long as this process lives


def register() -> None:
    """Register the backend; with ``SYNCPRIMS_SERVE_TORCH=1``, let it serve every process group.

    ``pytest --syncprims-worlds`` sets ``SYNCPRIMS_SUITE``, with which it serves what it can.
    """
    serve = os.environ.get("SYNCPRIMS_SERVE_TORCH") or "0"
    if serve not in ("0", "1"):
        raise ValueError(f"SYNCPRIMS_SERVE_TORCH={serve!r}: it takes 0 or 1")
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_available() or hasattr(dist.Backend, _NAME.upper()):
        return
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if serve == "1":
        from syncprims.c10d.torch_internals import serve_every_backend

        _serving.enter_context(serve_every_backend())
    elif suite := os.environ.get("SYNCPRIMS_SUITE"):
        from syncprims.c10d.torch_internals import serve_groups

        _serving.enter_context(serve_groups(functools.partial(_open_in_suite, suite)))


def _open_in_suite(folder: str, *group: Any) -> Any:
    from syncprims.testing.torch_worlds.suite_groups import open_group

    return open_group(Path(folder), *group)


def _create(options: Any, backend_options: object = None) -> Any:
    from syncprims.c10d.process_group import create_process_group

    return create_process_group(options, backend_options)
