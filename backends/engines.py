"""Bulk data between hosts, by torch's process groups.

Gloo carries bytes through groups of our own: what breaks there leaves the program's groups whole.
NCCL carries tensors between devices through the default group, since a second communicator costs
memory on every device, and two in flight at once can block each other.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed

from syncprims.interface import DeviceEngine, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .stores import StoreSource

dist: Any = torch.distributed  # its types leave out what its documentation names

#: Nothing may end a transfer but a death, which the control plane sees; and while rank 0 prepares
#: data for an hour in `main_first`, what others have queued before may wait for it.
LONG = timedelta(days=1)
_CONNECT = timedelta(minutes=5)


class GlooEngine(Engine):
    """Gloo among the members of one board, connected when the first bytes are to be carried."""

    def __init__(self, source: StoreSource, prefix: str, index: int, count: int) -> None:
        self._source = source
        self._prefix = prefix
        self._index = index
        self._count = count
        self._group: Any = None

    def broadcast(self, data: memoryview, src: int) -> None:
        """Fill `data` with that of member number `src`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._connected().broadcast([_tensor(data)], options).wait()

    def exchange(self, mine: memoryview, theirs: memoryview) -> None:
        """Send the i-th of equal parts of `mine` to member i; what it sends is that of `theirs`."""
        group = self._connected()
        group.alltoall_base(_tensor(theirs), _tensor(mine), [], [], dist.AllToAllOptions()).wait()

    def gather(self, mine: memoryview, all_: memoryview) -> None:
        """Fill the i-th of equal parts of `all_` with what member i calls `mine`."""
        parts = list(_tensor(all_).chunk(self._count))
        self._connected().allgather(parts, _tensor(mine)).wait()

    def _connected(self) -> Any:
        if self._group is None:
            store = dist.PrefixStore(self._prefix, self._source.connect())
            self._group = _gloo(store, self._index, self._count, self._source.host)
        return self._group


def _gloo(store: Any, index: int, count: int, towards: str) -> Any:
    """Return a Gloo group that speaks over the interface on which the store is reached.

    By itself Gloo asks what this host's own name means, which is a loopback address on many; unless
    GLOO_SOCKET_IFNAME says which interface it is to be.
    """
    make: Any = dist.ProcessGroupGloo
    with contextlib.suppress(AttributeError, OSError):  # of versions that say it otherwise
        options = make._Options()
        address = _own_address(towards)
        options._devices = [make.create_device(hostname=address)]
        options._timeout = _CONNECT
        group = make(store, index, count, options)
        with contextlib.suppress(AttributeError):
            group._set_default_timeout(LONG)
        return group
    return make(store, index, count, LONG)


def _own_address(towards: str) -> str:
    """Return this host's address on the way to another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _tensor(data: memoryview) -> Any:
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
