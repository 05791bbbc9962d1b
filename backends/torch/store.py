"""The rendezvous store of a run: where it is, who serves it, and how to connect."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed

from syncprims.errors import BackendUnavailable, ConfigurationError

from .store_link import StoreGone

if TYPE_CHECKING:
    import threading

    from syncprims.interface import Settings, Topology

dist: Any = torch.distributed  # its types leave out what its documentation names

TRY_AGAIN = 0.05  # seconds between two attempts to reach a store
_ONE_ATTEMPT = 0.5  # seconds: shorter than the farewell of a link whose thread is in one
_FOREVER = timedelta(days=365)  # a wait ends with its answer; deadlines are the rank's own


class StoreSource:
    """A store that all ranks of a run reach; every thread makes a connection of its own."""

    #: What this process serves, by address, until it ends: the next world may have it again. A
    #: server that went with its world would go under the feet of ranks that are in the next.
    _served: ClassVar[dict[str, Any]] = {}

    def __init__(self, host: str, port: int, prefix: str, join_timeout: float) -> None:
        self.address = f"{host}:{port}"
        self.served_by_rank_0 = False  #: so that rank 0 must leave last
        self.refusal: OSError | None = None  #: what the last attempt to reach it has met
        self._host = host
        self._port = port
        self._prefix = prefix
        self._patience = timedelta(seconds=join_timeout)
        self._kept: Any = None  # lives as long as this does

    @property
    def host(self) -> str:
        """Where the store is served."""
        return self._host

    def await_served(self, closing: threading.Event) -> None:
        """Return once somebody listens there.

        In C++ a connection would wait for that, and for longer than it was told to. A thread that
        comes back from there while Python ends takes the process with it, by SIGABRT.

        :raises StoreGone: if `closing` is set meanwhile.
        """
        if self.address in self._served:
            return
        while not closing.wait(TRY_AGAIN if self.refusal else 0):
            try:
                socket.create_connection((self._host, self._port), _ONE_ATTEMPT).close()
            except OSError as error:  # nobody is there yet, or its name is not known yet
                self.refusal = error
            else:
                self.refusal = None
                return
        raise StoreGone("it was given up")

    def connect(self) -> Any:
        """Return a new connection, for one thread; it blocks until the store is served."""
        store = dist.TCPStore(
            self._host,
            self._port,
            is_master=False,
            timeout=self._patience,
            wait_for_workers=False,
        )
        store.set_timeout(_FOREVER)
        return dist.PrefixStore(self._prefix, store)

    def serve(self) -> None:
        """Serve the store in this process.

        :raises BackendUnavailable: if the port is taken, or cannot be opened here.
        """
        if self.address in self._served:
            return
        try:
            # Several tenants: a process group that the program makes at the same address shares it.
            self._served[self.address] = dist.TCPStore(
                self._host, self._port, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            raise BackendUnavailable(
                f"rank 0 cannot serve the store at {self.address}: "
                f"{str(error).partition(chr(10))[0]}. Set MASTER_ADDR to the host of rank 0 and "
                f"MASTER_PORT to a free port there, the same on all ranks"
            ) from error

    def keep(self, store: Any) -> None:
        """Keep a store alive that somebody else has made."""
        self._kept = store

    def close(self) -> None:
        """Let go of what was kept."""
        self._kept = None


def check_findable(topology: Topology, settings: Settings) -> None:
    """Return only if something says where the ranks of this run meet.

    :raises ConfigurationError: naming what to set.
    """
    grouped = dist.is_available() and dist.is_initialized()
    if grouped or settings.store is not None:
        return
    if topology.num_nodes > 1:
        raise ConfigurationError(
            f"{topology.launcher} started {topology.num_nodes} nodes, and nothing says where their "
            f"ranks meet: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port "
            f"there, the same on all ranks, or start them with torchrun"
        )
    if topology.run_id is None:
        raise ConfigurationError(
            f"{topology.launcher} says neither where the ranks of this run meet nor what it is "
            f"called: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, "
            f"or, on one host, SYNCPRIMS_RUN_ID, the same on all ranks"
        )


def find_store(topology: Topology, settings: Settings) -> StoreSource | None:
    """Return the store of this run; None if it is a run of one host without any.

    That of torchrun's agent if there is one, else that of the initialized default group, else one
    that rank 0 serves at MASTER_ADDR and MASTER_PORT.

    Asked after :func:`check_findable`.
    """
    prefix = f"syncprims/{topology.run_id or 'run'}"
    grouped = dist.is_available() and dist.is_initialized()
    if topology.launcher == "syncprims" and topology.num_nodes == 1 and topology.run_id is not None:
        return None  # they share this host, and `syncprims run` has named what they are there
    if settings.store is not None and (settings.agent_store or not grouped):
        source = StoreSource(*settings.store, prefix, settings.join_timeout)
        if not settings.agent_store:
            source.served_by_rank_0 = True
            if topology.rank == 0:
                source.serve()
        return source
    if grouped:
        return _of_default_group(prefix, topology, settings.join_timeout)
    return None


def _of_default_group(prefix: str, topology: Topology, join_timeout: float) -> StoreSource | None:
    """Return the store with which the program has initialized ``torch.distributed``.

    None if it cannot be shared, and a run on one host can do without.
    """
    # Torch has no public name for it, and the ranks must meet where they have met before.
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    inner: Any = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, dist.TCPStore):
        launched = topology.run_id is not None and topology.launcher != "torch.distributed"
        if launched and topology.num_nodes == 1:
            return None
        raise ConfigurationError(
            f"torch.distributed was initialized with a {type(inner).__name__}, and only a TCPStore "
            f"can be shared: initialize it with env:// or tcp://, or start the ranks with torchrun"
        )
    source = StoreSource(inner.host, inner.port, prefix, join_timeout)
    source.keep(store)
    source.served_by_rank_0 = True
    return source
