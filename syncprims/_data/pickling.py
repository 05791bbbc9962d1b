"""Pickles between ranks, in which tensors of devices stand apart.

A plain pickle would bring them to their sender's device.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from .devices import arrived, has_devices, portable


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return portable(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, local_rank: int) -> None:
        super().__init__(file)
        self._local_rank = local_rank

    def persistent_load(self, pid: Any) -> Any:
        return arrived(pid, self._local_rank)


def dumps(obj: object) -> bytes:
    """Return `obj` as a pickle."""
    if not has_devices():  # then there is nothing to look for in every part of it
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


def loads(data: bytes, local_rank: int) -> Any:
    """Return what :func:`dumps` wrote, its tensors on this rank's own device."""
    return _Unpickler(io.BytesIO(data), local_rank).load()
