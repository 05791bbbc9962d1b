"""The rendezvous store of a run: where it is, who serves it, and the connections to it.

A store's client waits inside C++: no signal, no deadline and no death reaches it there, and on a
link that was cut it waits forever. So only a :class:`StoreLink`'s own thread ever waits for the
store. The rank waits for that thread as it waits for everything else: with a deadline, and
interruptibly.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch.distributed

from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.interface import Settings, Topology

from .decisions import Store
from .private_names import NAMES

dist: Any = torch.distributed  # its types leave out what its documentation names
T = TypeVar("T")
_Request: TypeAlias = "tuple[Callable[[Any], Any], futures.Future[Any]]"

TRY_AGAIN = 0.05  #: seconds between two attempts to reach a store
_ONE_ATTEMPT = 0.5  # seconds: less than closing a link may take, whose thread is in an attempt
_FOREVER = timedelta(days=365)  # a wait ends with its answer; deadlines are the rank's own
#: Seconds that a thread gets to end. One that waits on a link that was cut never does, and stays
#: in C++ until the process ends.
_CLOSE_TIMEOUT = 1.0
_CURE = "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"


class StoreGone(Exception):
    """The store did not answer in time, or never will."""


@dataclass(eq=False)
class StoreLink:
    """One connection, made at the first request: its thread handles requests one after another."""

    name: str
    connect: Callable[[], Any]
    _: KW_ONLY
    #: Called before that. It waits where Python can still be interrupted, returns when the store is
    #: served, and raises when the event that it gets is set.
    await_served: Callable[[threading.Event], None] | None = None
    every: float = 0.0
    beat: Callable[[Any], None] | None = None  #: called with the store every so many seconds
    broken: BaseException | None = None  #: why the store will never answer again
    _closing: threading.Event = field(default_factory=threading.Event)
    _requests: queue.SimpleQueue[_Request | None] = field(default_factory=queue.SimpleQueue[Any])
    _thread: threading.Thread | None = None
    _busy_since: float | None = None

    @property
    def silent_for(self) -> float:
        """Seconds for which the oldest unanswered request has been waiting."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def idle(self) -> bool:
        """True if no request is waiting or being handled."""
        return self._busy_since is None and self._requests.empty()

    def submit(self, work: Callable[[Any], T]) -> futures.Future[T]:
        """Queue ``work(store)`` for the thread; return before it has run."""
        future: futures.Future[T] = futures.Future()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"syncprims-{self.name}", daemon=True
            )
            self._thread.start()
        self._requests.put((work, future))
        return future

    def ask(self, work: Callable[[Any], T], timeout: float) -> T:
        """Return what ``work(store)`` returns.

        :raises StoreGone: if there is no answer within `timeout` seconds, or no store any more.
        """
        if self.broken is not None:
            raise StoreGone(first_line(self.broken))
        future = self.submit(work)
        try:
            return future.result(timeout)
        except futures.TimeoutError:
            raise StoreGone(f"no answer for {timeout:g} s") from None
        except Exception as error:
            if self.broken is None:
                raise
            raise StoreGone(first_line(error)) from error

    def close(self) -> None:
        """End the thread, and with it the connection."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._requests.put(None)
            thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        store: Any = None
        next_beat = time.monotonic()
        while True:
            beats = self.beat is not None and self.broken is None
            # What the thread does if a heartbeat is due first.
            request: _Request | None = (lambda store: None), futures.Future()
            with contextlib.suppress(queue.Empty):
                wait = max(0.0, next_beat - time.monotonic()) if beats else None
                request = self._requests.get(timeout=wait)
            if request is None:
                return
            work, future = request
            self._busy_since = time.monotonic()
            try:
                if self.broken is not None:
                    raise StoreGone(str(self.broken))  # a new one: a traceback grows at each raise
                if store is None:
                    if self.await_served is not None:
                        self.await_served(self._closing)
                    store = self.connect()
                if self.beat is not None and time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self.every
                    with contextlib.suppress(OSError, ValueError):  # the next one may succeed
                        self.beat(store)
                result = work(store)
            except BaseException as error:
                # What torch raises when the connection has failed, and for nothing else here.
                if isinstance(error, RuntimeError) and self.broken is None:
                    self.broken = error
                self._busy_since = None
                future.set_exception(error)
            else:
                self._busy_since = None
                future.set_result(result)


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text."""
    return str(error).partition("\n")[0]


class StoreEndpoint:
    """A store that all ranks of a run reach; every thread makes a connection of its own."""

    #: What this process serves, by address, until it ends: the next world may use it again. If a
    #: server ended with its world, ranks that are in the next one would lose it.
    _served: ClassVar[dict[str, Any]] = {}

    def __init__(self, host: str, port: int, prefix: str, join_timeout: float) -> None:
        self.host = host
        self.address = f"{host}:{port}"
        self.served_by_rank_0 = False  #: so that rank 0 must leave last
        self.refusal: OSError | None = None  #: what the last attempt to reach it raised
        self.peer: tuple[int, Any] | None = None  #: its address family and address, once reached
        self.kept: Any = None  #: a store that must live as long as this
        self.port = port
        self.prefix = prefix
        self._timeout = timedelta(seconds=join_timeout)

    def await_served(self, closing: threading.Event) -> None:
        """Return once the store's port accepts connections.

        A connection waits for that in C++, and for longer than its timeout. A thread that returns
        from there while Python ends takes the process with it, by SIGABRT.

        :raises StoreGone: if `closing` is set meanwhile.
        """
        if self.address in self._served:
            return
        while not closing.wait(TRY_AGAIN if self.refusal else 0):
            try:
                with socket.create_connection((self.host, self.port), _ONE_ATTEMPT) as reached:
                    self.peer = reached.family, reached.getpeername()
            except OSError as error:  # it is not served yet, or its name is not known yet
                self.refusal = error
            else:
                self.refusal = None
                return
        raise StoreGone("this rank has stopped waiting for it")

    def connect(self) -> Any:
        """Return a new connection, for one thread; it blocks until the store is served."""
        store = dist.TCPStore(
            self.host, self.port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )
        store.set_timeout(_FOREVER)
        return dist.PrefixStore(self.prefix, store)

    def serve(self) -> None:
        """Serve the store in this process.

        :raises BackendUnavailable: if the port is taken, or cannot be opened here.
        """
        if self.address in self._served:
            return
        try:
            # Several tenants: a process group that the program makes at the same address shares it.
            self._served[self.address] = dist.TCPStore(
                self.host, self.port, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            what = f"rank 0 cannot serve the store at {self.address}: {first_line(error)}"
            raise BackendUnavailable(f"{what}. Set {_CURE}, the same on all ranks") from error


class StoreProbe:
    """Distinguishes a store that is stopped from one that is cut off.

    While the process that serves the store is stopped, or gets no processor, the kernel of its host
    still accepts connections and answers for them. If the host is gone, or the network to it, no
    kernel answers. So a store that does not answer counts as lost only if its host does not either.
    """

    def __init__(self, endpoint: StoreEndpoint, limit: float) -> None:
        """`limit` is how many seconds of silence mean that the host is gone."""
        self._endpoint = endpoint
        self._limit = limit
        self._socket: socket.socket | None = None
        self._since = 0.0  # when it began to connect

    def is_cut_off(self, silence: float) -> bool:
        """Return whether the store, silent for `silence` seconds, is out of reach; do not wait."""
        if silence < self._limit / 2 or self._endpoint.peer is None:  # or this process serves it
            self.close()
            return False
        now = time.monotonic()
        if self._socket is None:
            self._socket, self._since = self._connect(*self._endpoint.peer), now
        poll = select.poll()  # one serves one thread, and several may wait
        poll.register(self._socket, select.POLLOUT)
        for _, event in poll.poll(0):
            if not event & (select.POLLERR | select.POLLHUP):
                self._since = math.inf  # connected; from now on the kernel keeps watch
                continue
            self.close()
            return silence >= self._limit
        return silence >= self._limit and now - self._since >= self._limit / 2

    def _connect(self, family: int, address: Any) -> socket.socket:
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.setblocking(False)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every = max(1, int(self._limit / 4))
        for name, value in (("KEEPIDLE", every), ("KEEPINTVL", every), ("KEEPCNT", 3)):
            with contextlib.suppress(AttributeError):  # macOS has its own names
                probe.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        probe.connect_ex(address)
        return probe

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def check_findable(topology: Topology, settings: Settings) -> None:
    """Return only if something says where the ranks of this run meet.

    :raises ConfigurationError: naming what to set.
    """
    if settings.store is not None or dist.is_initialized():
        return
    if topology.num_nodes != 1:
        nodes = "several" if topology.num_nodes < 1 else topology.num_nodes
        started = f"{topology.launcher} started {nodes} nodes"
        if max(topology.num_nodes, topology.local_world_size) < 1:
            started = f"{topology.launcher} does not say which ranks share a host"
        what = f"{started}, and nothing says where the ranks meet: set {_CURE}"
        raise ConfigurationError(f"{what}, the same on all ranks, or use torchrun")
    if topology.run_id is None:
        what = f"{topology.launcher} names neither where the ranks of this run meet nor the run"
        raise ConfigurationError(f"{what}: set {_CURE}, or, on one host, SYNCPRIMS_RUN_ID")


def find_store(topology: Topology, settings: Settings) -> StoreEndpoint | None:
    """Return the store of this run; None if it is a run of one host without any.

    That of torchrun's agent if there is one, else that of the initialized default group, else one
    that rank 0 serves at MASTER_ADDR and MASTER_PORT. Called after :func:`check_findable`.
    """
    prefix = f"syncprims/{topology.run_id or 'run'}"
    initialized = dist.is_initialized()
    if topology.launcher == "syncprims" and topology.num_nodes == 1 and topology.run_id is not None:
        return None  # all share this host, and `syncprims run` gave the run a name
    own = topology.launcher == "torch.distributed"  # then other stores belong to other groups
    if settings.store is not None and not own and (settings.agent_store or not initialized):
        endpoint = StoreEndpoint(*settings.store, prefix, settings.join_timeout)
        if not settings.agent_store:
            endpoint.served_by_rank_0 = True
            if topology.rank == 0:
                endpoint.serve()
        return endpoint
    if not initialized:
        return None
    store, inner = _get_default_store()
    if not isinstance(inner, dist.TCPStore):
        return None
    if own:  # several groups may share a server, each with a prefix of its own
        prefix = f"syncprims/{_name_run(store)}"
    endpoint = StoreEndpoint(inner.host, inner.port, prefix, settings.join_timeout)
    endpoint.kept = store
    endpoint.served_by_rank_0 = True
    return endpoint


def find_run_id(topology: Topology) -> str | None:
    """Return what identifies a run on one host that has no :func:`find_store`.

    If no launcher says it, the ranks agree through the store of the default group.

    :raises ConfigurationError: if that is one that only torch can use.
    """
    launched = topology.launcher != "torch.distributed" and topology.num_nodes == 1
    if not dist.is_initialized() or (launched and topology.run_id is not None):
        return topology.run_id
    store, inner = _get_default_store()
    if not isinstance(inner, dist.FileStore):
        what = f"torch.distributed was initialized with a {type(inner).__name__}"
        cure = "initialize it with env:// or tcp://, or use torchrun"
        raise ConfigurationError(f"{what}, and ranks can share a TCPStore or FileStore; {cure}")
    return _name_run(store)


def _get_default_store() -> tuple[Any, Any]:
    """Return the store of the default group, and the one below its prefixes."""
    # Torch has no public name for it, and the ranks must meet where they have met before.
    store = NAMES["_get_default_store"]()
    inner: Any = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return store, inner


def _name_run(store: Store) -> str:
    """Return a name that all ranks of the default group agree on, and no other group has."""
    return bytes(store.compare_set("syncprims/run", "", secrets.token_hex(8))).decode()
