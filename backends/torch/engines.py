"""Bulk data by torch's process groups: bytes between hosts, and tensors between devices.

Gloo carries bytes through groups of our own: what breaks there leaves the program's groups intact.
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

    from syncprims.interface import Topology

    from .store import StoreEndpoint

dist: Any = torch.distributed  # its types leave out what its documentation names

#: Only the end of a process may end a transfer, and the control plane sees that. While rank 0
#: prepares data for an hour in `main_first`, transfers that others have queued may wait for it.
_LONG = timedelta(days=1)
_CONNECT = timedelta(minutes=5)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001  # seconds between two looks at a transfer
_ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737): for the route to the world


def _never_destroy(thing: object) -> None:
    """Keep `thing` as it is until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class GlooEngine(Engine):
    """Gloo among the members of one board; it connects for the first transfer."""

    def __init__(
        self, endpoint: StoreEndpoint, prefix: str, index: int, count: int, interfaces: str | None
    ) -> None:
        """`interfaces` are names, with commas between; None: the one that leads to the store."""
        self._endpoint = endpoint
        self._prefix = prefix
        self._index = index
        self._count = count
        self._interfaces = interfaces
        self._process = os.getpid()  # only here are the group's threads
        self._group: Any = None
        self._pending: Any = None
        self._closed = False

    def broadcast(self, data: memoryview, src: int) -> None:
        """Fill `data` with the data of member number `src`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._finish(self._connected().broadcast([_tensor(data)], options))

    def exchange(self, mine: memoryview, theirs: memoryview) -> None:
        """All-to-all: part i of `mine` goes to member i; part i of `theirs` comes from it."""
        options = dist.AllToAllOptions()
        theirs_, mine_ = _tensor(theirs), _tensor(mine)
        self._finish(self._connected().alltoall_base(theirs_, mine_, [], [], options))

    def gather(self, mine: memoryview, all_: memoryview) -> None:
        """All-gather: part i of `all_` is `mine` of member i."""
        parts = list(_tensor(all_).chunk(self._count))
        self._finish(self._connected().allgather(parts, _tensor(mine)))

    def close(self) -> None:
        """End a pending transfer, and release the group."""
        self._closed = True
        group, self._group = self._group, None
        # To destroy it would wait for a peer that may be gone, or a forked child for its threads.
        if group is not None and (self._pending is not None or os.getpid() != self._process):
            _never_destroy(group)

    def _finish(self, work: Any) -> None:
        # Not `work.wait()`: a thread that is in there when Python ends aborts the process.
        self._pending = work
        pause = _FIRST_PAUSE
        while not work.is_completed():
            if self._closed:
                raise RuntimeError("the transfer was given up")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._pending = None
        work.wait()

    def _connected(self) -> Any:
        if self._closed:
            raise RuntimeError("this engine is closed")
        if self._group is None:
            self._group = self._connect()
        return self._group

    def _connect(self) -> Any:
        """Return a Gloo group on the named interfaces, or on the one that leads to the store.

        Gloo itself looks up this host's own name: a loopback address on many hosts.
        """
        store = dist.PrefixStore(self._prefix, self._endpoint.connect())
        make: Any = dist.ProcessGroupGloo
        options = make._Options()
        if self._interfaces:
            names = self._interfaces.split(",")
            options._devices = [make.create_device(interface=name) for name in names]
        else:
            address = _own_address(self._endpoint.host)
            options._devices = [make.create_device(hostname=address)]
        options._timeout = _CONNECT
        group = make(store, self._index, self._count, options)
        group._set_default_timeout(_LONG)
        return group


def _own_address(towards: str) -> str:
    """Return this host's address on the route to another; nothing is sent."""
    address = _address_towards(towards)
    if _is_loopback(address) and not _is_loopback(towards):
        # It is this host, by a name that others cannot use: then its address to the world.
        with contextlib.suppress(OSError):
            return _address_towards(_ELSEWHERE)
    return address


def _address_towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _tensor(data: memoryview) -> Any:
    if data.readonly:  # torch warns about these, though a transfer only reads what it sends
        address = numpy.frombuffer(data, numpy.uint8).ctypes.data
        data = memoryview((ctypes.c_uint8 * len(data)).from_address(address))
    return torch.frombuffer(data, dtype=torch.uint8)


class NcclEngine(DeviceEngine):
    """The default process group, or a group of some of its ranks."""

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
        """`open_default` opens torch's default group if there is none."""
        self._members = tuple(members)
        self._everybody = len(self._members) == world_size
        self._open_default = open_default
        self._group: Any = None

    def takes(self, tensor: Any, op: str | None = None) -> bool:
        """Return whether NCCL supports the dtype, and the result has the same.

        A group of some ranks cannot open the default group, which needs all.
        """
        if not (self._everybody or dist.is_initialized()):
            return False
        if tensor.device.type != "cuda" or tensor.dtype not in self._DTYPES:
            return False
        return op != "mean" or tensor.dtype.is_floating_point

    def broadcast(self, tensor: Any, src: int) -> None:
        """Fill `tensor` with the data of member number `src`."""
        dist.broadcast(tensor, self._members[src], group=self._ready())

    def all_reduce(self, tensor: Any, op: str) -> None:
        """Reduce `tensor` in place."""
        dist.all_reduce(tensor, self._OPS[op], group=self._ready())
        if op == "mean":
            tensor /= len(self._members)

    def _ready(self) -> Any:
        if self._group is None:
            self._open_default()
            self._group = dist.group.WORLD
            if not self._everybody:
                members = list(self._members)
                self._group = dist.new_group(members, use_local_synchronization=True)
        return self._group


class DefaultGroup:
    """torch's default process group, if a world opens it: then it ends with that world.

    To destroy it is to wait for what is pending in it, and so for peers. After a normal end that is
    right, since they may still come. After a failure they may never come, and no rank waits: Gloo's
    groups stay as they are until the process ends. NCCL's are left to torch, which aborts what is
    pending there as Python exits.
    """

    def __init__(self) -> None:
        self._opened = False

    def open(self, store: Any, topology: Topology, device: int | None) -> None:
        """Open the group: Gloo's, and if a CUDA device is given, NCCL's for that device."""
        options: dict[str, Any] = {"backend": "gloo"}
        if device is not None:
            options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", device)}
        options |= {"store": store, "rank": topology.rank, "world_size": topology.world_size}
        dist.init_process_group(**options, timeout=_LONG)
        self._opened = True

    def close(self, *, normally: bool) -> None:
        """Destroy the group if a world opened it, and all that the program has made from it."""
        opened, self._opened = self._opened, False
        if opened and dist.is_initialized() and (normally or _keep_gloo()):
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave the group to the parent, in a forked child: Gloo's threads are not there to end."""
        if self._opened and dist.is_initialized():
            _keep_gloo()


def _keep_gloo() -> bool:
    """Keep all Gloo groups until the process ends; return whether there are no other groups."""
    # Torch has no public name for either, and the program may have made groups of its own.
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    gloo = [backend for backend in backends if backend._get_backend_name() == "gloo"]
    for backend in gloo:
        _never_destroy(backend)
    return len(gloo) == len(backends)
