"""Bulk data between hosts, by torch's process groups.

Gloo carries bytes through groups of our own: what breaks there leaves the program's groups whole.
NCCL carries tensors between devices through the default group, since a second communicator costs
memory on every device, and two in flight at once can block each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch
import torch.distributed

from syncprims.interface import DeviceEngine, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .store import StoreSource

dist: Any = torch.distributed  # its types leave out what its documentation names

#: Nothing may end a transfer but a death, which the control plane sees; and while rank 0 prepares
#: data for an hour in `main_first`, what others have queued before may wait for it.
LONG = timedelta(days=1)
_CONNECT = timedelta(minutes=5)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001  # seconds between two looks at a transfer
_ELSEWHERE = "192.0.2.1"  # of nobody (RFC 5737): where packets to the world would go


def keep(thing: object) -> None:
    """Leave `thing` as it is, to the process's end: nothing destroys it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class GlooEngine(Engine):
    """Gloo among the members of one board, connected when the first bytes are to be carried."""

    def __init__(
        self,
        source: StoreSource,
        prefix: str,
        index: int,
        count: int,
        interfaces: str | None = None,
    ) -> None:
        """`interfaces` are names of this host's, with commas between; None: on the store's way."""
        self._source = source
        self._prefix = prefix
        self._index = index
        self._count = count
        self._interfaces = interfaces
        self._process = os.getpid()  # which has the group's threads
        self._group: Any = None
        self._under_way: Any = None
        self._closed = False

    def broadcast(self, data: memoryview, src: int) -> None:
        """Fill `data` with that of member number `src`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._finish(self._connected().broadcast([_tensor(data)], options))

    def exchange(self, mine: memoryview, theirs: memoryview) -> None:
        """Send the i-th of equal parts of `mine` to member i; what it sends is that of `theirs`."""
        options = dist.AllToAllOptions()
        theirs_, mine_ = _tensor(theirs), _tensor(mine)
        self._finish(self._connected().alltoall_base(theirs_, mine_, [], [], options))

    def gather(self, mine: memoryview, all_: memoryview) -> None:
        """Fill the i-th of equal parts of `all_` with what member i calls `mine`."""
        parts = list(_tensor(all_).chunk(self._count))
        self._finish(self._connected().allgather(parts, _tensor(mine)))

    def close(self) -> None:
        """End what is under way, and let go of the group."""
        self._closed = True
        group, self._group = self._group, None
        if group is None:
            return
        # Its end would wait for a peer that may be gone, or in a forked child for its threads.
        if self._under_way is not None or os.getpid() != self._process:
            keep(group)

    def _finish(self, work: Any) -> None:
        # Not by `wait`: a thread that is in there when Python ends takes the process down with it.
        self._under_way = work
        pause = _FIRST_PAUSE
        while not work.is_completed():
            if self._closed:
                raise RuntimeError("the transfer was given up")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._under_way = None
        work.wait()

    def _connected(self) -> Any:
        if self._closed:
            raise RuntimeError("this engine is closed")
        if self._group is None:
            store = dist.PrefixStore(self._prefix, self._source.connect())
            self._group = self._connect(store)
        return self._group

    def _connect(self, store: Any) -> Any:
        """Return a Gloo group on the interfaces that were named, or that which leads to the store.

        By itself Gloo asks what this host's own name means: a loopback address on many.
        """
        make: Any = dist.ProcessGroupGloo
        try:
            options = make._Options()
            if self._interfaces:
                names = self._interfaces.split(",")
                options._devices = [make.create_device(interface=name) for name in names]
            else:
                address = _own_address(self._source.host)
                options._devices = [make.create_device(hostname=address)]
            options._timeout = _CONNECT
        except AttributeError:  # of a version that says it otherwise
            return make(store, self._index, self._count, _CONNECT)
        group = make(store, self._index, self._count, options)
        with contextlib.suppress(AttributeError):
            group._set_default_timeout(LONG)
        return group


def _own_address(towards: str) -> str:
    """Return this host's address on the way to another; nothing is sent."""
    address = _address_towards(towards)
    if ipaddress.ip_address(address).is_loopback and not _is_loopback(towards):
        # This host itself, by a name that means nothing to others: then its address to the world.
        with contextlib.suppress(OSError):
            return _address_towards(_ELSEWHERE)
    return address


def _address_towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _tensor(data: memoryview) -> Any:
    if data.readonly:  # torch warns of these, though nothing is written to what is sent
        address = numpy.frombuffer(data, numpy.uint8).ctypes.data
        data = memoryview((ctypes.c_uint8 * len(data)).from_address(address))
    return torch.frombuffer(data, dtype=torch.uint8)


class NcclEngine(DeviceEngine):
    """The default process group, among all its ranks or some."""

    _OPS: ClassVar = {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "prod": dist.ReduceOp.PRODUCT,
    }
    _DTYPES: ClassVar = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    )  # fmt: skip

    def __init__(
        self, members: Sequence[int], world_size: int, open_default: Callable[[], None]
    ) -> None:
        self._members = tuple(members)
        self._everybody = len(self._members) == world_size
        self._open_default = open_default
        self._group: Any = None

    def takes(self, tensor: Any, op: str | None = None) -> bool:
        """Tell whether NCCL knows the dtype, and the result is of the same.

        A group of some ranks cannot make the default group, which takes all.
        """
        if not (self._everybody or dist.is_initialized()):
            return False
        if tensor.device.type != "cuda" or tensor.dtype not in self._DTYPES:
            return False
        return op != "mean" or tensor.dtype.is_floating_point

    def broadcast(self, tensor: Any, src: int) -> None:
        """Fill `tensor` with that of member number `src`."""
        dist.broadcast(tensor, self._members[src], group=self._ready())

    def all_reduce(self, tensor: Any, op: str) -> None:
        """Reduce `tensor` in place."""
        dist.all_reduce(tensor, self._OPS[op], group=self._ready())
        if op == "mean":
            tensor /= len(self._members)

    def _ready(self) -> Any:
        if self._group is None:
            if not dist.is_initialized():
                self._open_default()
            self._group = (
                dist.group.WORLD
                if self._everybody
                else dist.new_group(list(self._members), use_local_synchronization=True)
            )
        return self._group
