"""Bulk data by torch's process groups: bytes between hosts, and tensors between devices.

Gloo carries bytes through groups of our own: what breaks there leaves the program's groups intact.
NCCL carries tensors between devices through the default group, since a second communicator costs
memory on every device, and two in flight at once can block each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import json
import math
import os
import select
import socket
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed

from syncprims._system.host import list_descriptors
from syncprims.interface import DeviceEngine, Engine, Topology

from .decisions import Store
from .private_names import NAMES
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


class Links:
    """Connections that show whether other hosts answer this host.

    Each host holds a port at which it does not listen. A host that can be reached refuses a
    connection to it at once; if the network between two hosts is cut, nothing answers.
    """

    def __init__(self, store: Store, index: int, hosts: Sequence[str], address: str, limit: float):
        """`hosts` are the names of the members' hosts; `limit` is in seconds, without an answer."""
        self._own = socket.socket(_family(address))
        self._own.bind((address, 0))
        store.set(f"link/{index}", json.dumps([address, self._own.getsockname()[1]]))
        self._name = hosts[index]
        firsts = {host: number for number, host in reversed([*enumerate(hosts)])}
        firsts.pop(self._name)
        self._ports = {h: json.loads(store.get(f"link/{n}")) for h, n in firsts.items()}
        self._limit = limit
        self._attempts: dict[str, socket.socket] = {}
        self._since = -math.inf

    def obstacle(self) -> str | None:
        """Return as :meth:`Engine.obstacle`; a round of attempts takes at most the limit."""
        now = time.monotonic()
        if not self._attempts and now > self._since + self._limit:
            self._since = now
            for host, (address, port) in self._ports.items():
                attempt = self._attempts[host] = socket.socket(_family(address))
                attempt.setblocking(False)
                attempt.connect_ex((address, port))
        for host, attempt in list(self._attempts.items()):
            poll = select.poll()
            poll.register(attempt, select.POLLOUT)
            answered = bool(poll.poll(0))
            error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if answered else 0
            if answered and error in (0, errno.ECONNREFUSED):
                self._attempts.pop(host).close()
            elif answered or now > self._since + self._limit:
                return f"hosts {self._name} and {host} do not reach each other"
        return None if self._attempts else ""

    def close(self) -> None:
        """Close all sockets."""
        for held in (self._own, *self._attempts.values()):
            held.close()


@dataclass(eq=False)
class GlooEngine(Engine):
    """Gloo among the members of one board; it connects for the first transfer."""

    endpoint: StoreEndpoint
    prefix: str
    index: int  #: of this member
    hosts: Sequence[str]  #: the names of all members' hosts
    interfaces: str | None  #: names, with commas between; None: the one that leads to the store
    limit: float  #: seconds without an answer after which a host counts as cut off
    _process: int = field(default_factory=os.getpid)  # only here are the group's threads
    _group: Any = None
    _links: Links | None = None
    _begin: float = math.inf  # of the transfer under way
    _failed_at: float = -math.inf
    _pending: Any = None
    _closed: bool = False

    def broadcast(self, data: memoryview, src: int) -> None:
        """Fill `data` with the data of member number `src`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._transfer(lambda group: group.broadcast([_tensor(data)], options))

    def exchange(self, mine: memoryview, theirs: memoryview) -> None:
        """All-to-all: part i of `mine` goes to member i; part i of `theirs` comes from it."""
        options = dist.AllToAllOptions()
        theirs_, mine_ = _tensor(theirs), _tensor(mine)
        self._transfer(lambda group: group.alltoall_base(theirs_, mine_, [], [], options))

    def gather(self, mine: memoryview, all_: memoryview) -> None:
        """All-gather: part i of `all_` is `mine` of member i."""
        parts = list(_tensor(all_).chunk(len(self.hosts)))
        self._transfer(lambda group: group.allgather(parts, _tensor(mine)))

    def obstacle(self) -> str | None:
        """Return which hosts do not reach each other, once a transfer takes suspiciously long."""
        if self._links is None or time.monotonic() < self._begin + self.limit / 2:
            return ""
        said = self._links.obstacle()
        # That a host answers does not say that its ranks live: their heartbeat does.
        if not said and time.monotonic() < self._failed_at + 2 * self.limit:
            return None
        return said

    def close(self) -> None:
        """End a pending transfer, and release the group."""
        self._closed = True
        if self._links is not None:
            self._links.close()
        group, self._group = self._group, None
        # To destroy it would wait for a peer that may be gone, or a forked child for its threads.
        if group is not None and (self._pending is not None or os.getpid() != self._process):
            _never_destroy(group)

    def _transfer(self, start: Callable[[Any], Any]) -> None:
        """Return once the work is done that ``start(group)`` returns."""
        if self._closed:
            raise RuntimeError("this engine is closed")
        self._begin = time.monotonic()
        try:
            if self._group is None:
                self._group = self._connect()
            # Not `work.wait()`: a thread that is in there when Python ends aborts the process.
            work = self._pending = start(self._group)
            pause = _FIRST_PAUSE
            while not work.is_completed():
                if self._closed:
                    raise RuntimeError("the transfer was given up")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            self._pending = None
            work.wait()
        except BaseException:
            self._begin, self._failed_at = -math.inf, time.monotonic()  # look for an obstacle
            raise

    def _connect(self) -> Any:
        """Return a Gloo group on the named interfaces, or on the one that leads to the store.

        Gloo itself looks up this host's own name: a loopback address on many hosts.
        """
        store = dist.PrefixStore(self.prefix, self.endpoint.connect())
        make = dist.ProcessGroupGloo
        options = NAMES["ProcessGroupGloo._Options"]()
        address = _own_address(self.endpoint.host)
        if self.interfaces:
            names = self.interfaces.split(",")
            devices = [make.create_device(interface=name) for name in names]
        else:
            devices = [make.create_device(hostname=address)]
        NAMES.set(options, "ProcessGroupGloo._Options._devices", devices)
        NAMES.set(options, "ProcessGroupGloo._Options._timeout", _CONNECT)
        self._links = Links(store, self.index, self.hosts, address, self.limit)
        group = make(store, self.index, len(self.hosts), options)
        NAMES.of(group, "ProcessGroupGloo._set_default_timeout")(_LONG)
        return group


def _own_address(towards: str) -> str:
    """Return this host's address on the route to another; nothing is sent."""
    address = _address_towards(towards)
    if _is_loopback(address) and not _is_loopback(towards):
        # The name means this host and resolves to a loopback address, which other hosts cannot
        # reach: use the address of the default route.
        with contextlib.suppress(OSError):
            return _address_towards(_ELSEWHERE)
    return address


def _address_towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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

    def takes(self, tensor: torch.Tensor, op: str | None = None) -> bool:
        """Return whether NCCL supports the dtype, and the result has the same.

        A group of some ranks cannot open the default group, which needs all.
        """
        if not (self._everybody or dist.is_initialized()):
            return False
        if tensor.device.type != "cuda" or tensor.dtype not in self._DTYPES:
            return False
        return op != "mean" or tensor.dtype.is_floating_point

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Fill `tensor` with the data of member number `src`."""
        dist.broadcast(tensor, self._members[src], group=self._ready())

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
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
        self._sockets: set[tuple[int, int]] = set()

    def open(self, store: Store, topology: Topology, device: int | None) -> None:
        """Open the group: Gloo's, and if a CUDA device is given, NCCL's for that device."""
        options: dict[str, Any] = {"backend": "gloo"}
        if device is not None:
            options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", device)}
        options |= {"store": store, "rank": topology.rank, "world_size": topology.world_size}
        before = _open_sockets()
        dist.init_process_group(**options, timeout=_LONG)
        self._sockets = _open_sockets() - before
        self._opened = True

    def close(self, *, normally: bool) -> None:
        """Destroy the group if a world opened it, and all that the program has made from it."""
        opened, self._opened = self._opened, False
        if opened and dist.is_initialized() and (normally or _pin_gloo_groups()):
            dist.destroy_process_group()

    def abort(self) -> None:
        """End the group, and every wait of its members in it; wait for none of them."""
        opened, self._opened = self._opened, False
        if not opened or not dist.is_initialized():
            return
        # Gloo has no such call, and its connections live as long as a model that DDP has wrapped.
        for fd, _ in self._sockets & _open_sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.getpeername()  # there is none: it is the one that Gloo listens at
                connection.shutdown(socket.SHUT_RDWR)
        if _pin_gloo_groups():
            dist.destroy_process_group()
        else:  # NCCL's call, for which torch has no public name
            NAMES["_abort_process_group"]()

    def abandon(self) -> None:
        """Leave the group to the parent, in a forked child: Gloo's threads are not there to end."""
        if self._opened and dist.is_initialized():
            _pin_gloo_groups()


def _open_sockets() -> set[tuple[int, int]]:
    """Return the sockets that this process has: descriptors, and what identifies each."""
    found: set[tuple[int, int]] = set()
    for fd in list_descriptors():
        with contextlib.suppress(OSError):  # it was that of the directory
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                found.add((fd, status.st_ino))
    return found


def _pin_gloo_groups() -> bool:
    """Keep all Gloo groups until the process ends; return whether all groups are Gloo's."""
    # Torch has no public name for either, and the program may have made groups of its own.
    backends = [
        NAMES.of(group, "ProcessGroup._get_backend")(device)
        for group in NAMES["_world"].pg_map
        for device in NAMES.of(group, "ProcessGroup._device_types")
    ]
    wrapped = [getattr(backend, "wrapped_pg", backend) for backend in backends]  # to debug torch
    gloo = [one for one in wrapped if isinstance(one, dist.ProcessGroupGloo)]
    for backend in gloo:
        _never_destroy(backend)
    return len(gloo) == len(backends)
