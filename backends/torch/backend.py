"""Ranks on one host or many, as torchrun and similar launchers start them: for training jobs.

The control plane has two levels. Ranks that share memory meet at the file backend's boards, and
hosts meet at the rendezvous store. A run on one host uses the store only until all have joined. A
barrier, a flag or a small object touches no device and no process group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed

from syncprims import errors
from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.interface import (
    NOTHING,
    UNKNOWN,
    Awaited,
    Backend,
    Board,
    Settings,
    State,
    Topic,
    Topology,
    own_device_index,
)

from ..file.backend import FileBackend, lives_here
from ..file.description import RankDescription, WorldDescription
from . import rendezvous
from . import store as stores
from .board import HostConnection, TwoLevelBoard
from .decisions import MemberEnd, Store, read_key
from .engines import DefaultGroup, NcclEngine
from .host_state import BEATS, Heartbeat
from .rendezvous import HostGroup, Placement, Rendezvous
from .roster import Processes, Roster
from .store import StoreEndpoint, StoreGone, StoreLink, StoreProbe, T

dist: Any = torch.distributed  # its types leave out what its documentation names

_NEW = "#"  # in the place of a host: between that of its memory, and what distinguishes it
_LEAVING = 2.0  # seconds to publish to the other hosts how this rank ends
_FAILED_LEAVING = 2.0  # seconds that a failed rank serves the store for the others
_EXIT_GRACE = 6.0  # for a rank of this host that waits to publish how another one ended
_MOST_FRAMES = 24  # of the stack that is published for readers from outside
_READ_EVERY = 1.0  # seconds between two readings of what a rank of another host publishes


class TorchBackend(Backend):
    """A rank of a run that torchrun, SLURM, MPI or the program itself has started."""

    name = "torch"
    spans_hosts = True
    detects_death = True
    has_process_group = True
    can_reform = True

    def __init__(self, topology: Topology, settings: Settings) -> None:
        self.check(topology, settings)
        super().__init__(topology, settings)
        self._boards: list[TwoLevelBoard] = []
        self._has_published = False
        # By processes of other hosts, and when that was read.
        self._published: dict[int, tuple[float, bytes]] = {}
        self._finished_since: dict[int, float] = {}  # ranks of this host
        self._ends_published: set[tuple[int, TwoLevelBoard]] = set()
        self._hosts: Processes | None = None  # if there are other hosts
        self._default = DefaultGroup()
        self._endpoint = stores.find_store(topology, settings) if topology.world_size > 1 else None
        self._links: tuple[StoreLink, ...] = ()
        if self._endpoint is None:
            run_id = stores.find_run_id(topology) if topology.world_size > 1 else topology.run_id
            ranks = list(range(topology.world_size))
            host = HostGroup("here", ranks, torch.cuda.device_count() >= topology.world_size)
            self._placement = Placement(run_id or "", [host])
            self.host = host.name
            place = topology._replace(run_id=run_id)
            self._join_here(place, ranks)
            return
        try:
            self._join(self._endpoint)
        except BaseException:
            self._release()
            raise
        here = self._local.meeting_place
        self.meeting_place = f"the store at {self._endpoint.address} and {here}"

    def _join_here(self, place: Topology, ranks: Sequence[int]) -> None:
        """Join the ranks of this host, which are all there are."""
        self._local = FileBackend(place, self.settings, self._description(ranks))
        self.process, self.meeting_place = self._local.process, self._local.meeting_place

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Refuse a torch that lacks something, and a run without a known meeting place."""
        if not dist.is_available():
            what = "this build of torch has no torch.distributed"
            raise BackendUnavailable(f"{what}; install another, or use SYNCPRIMS_BACKEND=file")
        if cls.name == "nccl" and not torch.cuda.is_available():
            what = f"backend 'nccl' needs a CUDA device, and rank {topology.rank} has none"
            raise BackendUnavailable(f"{what}; SYNCPRIMS_BACKEND=torch needs none")
        if dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            if (rank, world_size) != (topology.rank, topology.world_size):
                ours = f"torch.distributed has rank={rank} and world_size={world_size}"
                theirs = f"rank={topology.rank} and world_size={topology.world_size}"
                cure = "initialize it so, or unset the launcher's variables"
                raise ConfigurationError(f"{ours}, and {topology.launcher} says {theirs}; {cure}")
        if topology.world_size > 1:
            stores.check_findable(topology, settings)

    # -- joining --------------------------------------------------------------------------------

    def _join(self, endpoint: StoreEndpoint) -> None:
        """Learn which ranks share this host, and join them."""
        top, settings = self.topology, self.settings
        deadline = time.monotonic() + settings.join_timeout
        warning = rendezvous.JoinWarning(settings.warn_after)
        while True:
            requests = StoreLink(  # which is asked first, so that only one of the two has to wait
                "requests",
                endpoint.connect,
                await_served=endpoint.await_served,
                every=settings.heartbeat / BEATS,
                beat=self._beat,
            )
            links = self._links = requests, StoreLink("waits", endpoint.connect)
            try:
                placement = Rendezvous(links, endpoint, top, settings, deadline, warning).run()
                break
            except StoreGone:
                # An earlier world may have served it, and it ended with that.
                self._close_links()
                time.sleep(stores.TRY_AGAIN)
        self._placement = placement
        Rendezvous.met.add(placement.token)
        if len(placement.hosts) == 1:
            (group,) = placement.hosts
            self.host = group.place
            self._join_here(top._replace(run_id=placement.token), group.ranks)
            self._close_links()
            return
        roster = Roster(placement)
        own = self._arrive(roster, endpoint) if placement.goes_on else top.rank
        host = roster.host_of[own]
        group = roster.hosts[host]
        self.host = group.place.partition(_NEW)[0]
        alone = [*roster.host_of.values()].count(host) == 1  # as the first process of a host is
        index, count = 0 if alone else roster.local.get(own, UNKNOWN), max(1, len(group.ranks))
        here = Topology(index, count, index, count, 0, 1, top.launcher, f"{placement.token}-{host}")
        self._local = FileBackend(here, settings, self._description(group.ranks or [top.rank]))
        try:
            lives, probe = self._local.liveness, StoreProbe(endpoint, settings.heartbeat)
            heartbeat = Heartbeat(placement.token, host, settings.heartbeat)
            meeting = lives, self._local, placement, host, placement.host_of[0]
            connection = HostConnection(*meeting, endpoint, *links, heartbeat, probe)
            self.process = own
            self._hosts = hosts = Processes(own, connection, roster, elastic=settings.elastic)
            self._ask(endpoint, heartbeat.beat)
            if placement.goes_on:  # from now on the others know that it waits
                lives_at = self._local.liveness.process
                self._ask(endpoint, lambda store: roster.write(store, own, lives_at))
                self._ask(endpoint, hosts.look)
        except BaseException:
            self._local.close()
            raise

    def _arrive(self, roster: Roster, endpoint: StoreEndpoint) -> int:
        """Take the next number in a run that goes on, and return it."""
        self._ask(endpoint, roster.read)
        place, name, devices = rendezvous.describe_here(self.settings)
        for number, host in enumerate(roster.hosts):
            run_id = f"{self._placement.token}-{number}"
            if host.place.partition(_NEW)[0] == place and lives_here(run_id, self.settings):
                group = host
                break
        else:  # a host on which nobody lives does not come back: this is another one
            place = f"{place}{_NEW}{secrets.token_hex(4)}"
            group = HostGroup(name, [], devices > 0, place)
        return self._ask(endpoint, lambda store: roster.arrive(store, group))

    def _ask(self, endpoint: StoreEndpoint, work: Callable[[Any], T]) -> T:
        """Return what ``work(store)`` returns, while this rank joins."""
        try:
            return self._links[0].ask(work, self.settings.join_timeout)
        except StoreGone as error:
            raise rendezvous.unreachable(self.topology, endpoint, error) from error

    def _description(self, ranks: Sequence[int]) -> WorldDescription:
        """Return what this host's part of the world, with these ranks, belongs to."""
        top = self.topology
        hosts = [[host.name, errors.format_ranks(host.ranks)] for host in self._placement.hosts]
        ours, store, at = errors.format_ranks(ranks), list[Any](), self._endpoint
        if at is not None and len(hosts) > 1:
            every = self.settings.heartbeat / BEATS
            store = [at.host, at.port, at.prefix, f"{self._placement.token}/rank", every]
        return WorldDescription(
            top.run_id or "", self.name, top.world_size, ours, hosts, store=store
        )

    # -- boards ---------------------------------------------------------------------------------

    def board(self, members: Sequence[int], name: str = "") -> Board:
        """Return the board of `members`: on one host shared memory alone, else two-level."""
        board = self._board(members, name)
        if self._may_use_nccl({self._placement.host_of[rank] for rank in members}):
            # Its first group takes all ranks of the world.
            size = self.topology.world_size
            board.device_engine = NcclEngine(members, size, self.open_process_group)
        return board

    def _board(self, members: Sequence[int], name: str) -> Board:
        if self._hosts is None:
            return self._local.board(members, name)
        connection = self._hosts.connection
        here = connection.ranks
        local = [rank for rank in members if rank in here]
        processes = [self._local.members[here.index(rank)] for rank in local]
        own = self._local.open_board(local, name, processes, members)
        if len(local) == len(members):
            return own
        file = self._local.file_of(members, name)
        with self._local.locked_directory():
            board = TwoLevelBoard(members, file, own, connection, self.settings.gloo_interfaces)
        self._boards.append(board)
        return board

    def close_board(self, board: Board) -> None:
        """Release this host's part of the board; its keys at the store remain."""
        if not isinstance(board, TwoLevelBoard):
            self._local.close_board(board)
            return
        self._boards.remove(board)
        board.close()
        self._local.release(board.members, board.local)

    def _may_use_nccl(self, hosts: Iterable[int]) -> bool:
        """Return whether NCCL serves the ranks of these hosts: it wants a device for each rank.

        Where each rank sees one device, these may be different ones (``srun --gpus-per-task``) or
        the same. To choose NCCL by name says that they differ; if not, NCCL itself refuses them.
        """
        if self.name != "torch":
            return self.name == "nccl"
        return all(self._placement.hosts[host].devices for host in hosts)

    def open_process_group(self) -> None:
        """Open torch's default group if there is none: for DDP, and for the program itself.

        This also chooses its device if it is to be NCCL's.
        """
        if dist.is_initialized():
            return
        top = self.topology
        if self._hosts is not None:
            prefix = f"{self._placement.token}/default-{self._local.epoch}"
            store = dist.PrefixStore(prefix, self._hosts.connection.endpoint.connect())
        else:
            with self._local.locked_directory() as directory:
                path = directory.reach(f"default-group-{self._local.epoch}")
            store = dist.FileStore(str(path), top.world_size)
        device: int | None = None
        if self._may_use_nccl(self._placement.host_of.values()):
            cuda = torch.cuda
            device = own_device_index(cuda.current_device(), cuda.device_count(), top.local_rank)
        self._default.open(store, top, device)

    def abort_process_group(self) -> None:
        """End torch's default group, if this has opened it."""
        self._default.abort()

    def enter(self, epoch: int, members: Sequence[int], topology: Topology) -> None:
        """Close all boards, and number the ranks of each host again."""
        while self._boards:
            self._boards.pop().close()
        self._published.clear()
        self.publish("waits", b"")
        super().enter(epoch, members, topology)
        hosts = self._hosts
        if hosts is None:
            (group,) = self._placement.hosts
            ranks = list(range(topology.world_size))
            self._placement = Placement(self._placement.token, [group._replace(ranks=ranks)])
            self._local.enter(epoch, members, topology)
            return
        number = hosts.connection.host
        roster = hosts.roster
        hosts.members = self.members
        of_rank = [roster.host_of[process] for process in members]
        groups = [
            group._replace(ranks=[rank for rank, host in enumerate(of_rank) if host == n])
            for n, group in enumerate(roster.hosts)
        ]
        ranks = groups[number].ranks
        self._placement = Placement(self._placement.token, groups)
        hosts.connection = hosts.connection._replace(placement=self._placement)
        index, count = ranks.index(topology.rank), len(ranks)
        here = Topology(
            index, count, index, count, 0, 1, topology.launcher, self._local.topology.run_id
        )
        local = [roster.local[members[rank]] for rank in ranks]
        self._local.enter(epoch, local, here, self._description(ranks))

    # -- beside the boards ------------------------------------------------------------------------

    @property
    def _processes(self) -> Processes | FileBackend:
        return self._local if self._hosts is None else self._hosts

    def decide(self, name: str, value: str = "") -> str:
        """Return the decision, at the store if there are several hosts."""
        return self._processes.decide(name, value)

    def publish(self, topic: Topic, value: bytes) -> None:
        """Make `value` readable for others, on this host and on other hosts."""
        hosts = self._hosts
        if hosts is not None and topic == "reform":
            hosts.publish(value)
            return
        self._local.publish(topic, value)
        if hosts is None or topic != "waits":
            return
        if value or self._has_published:
            self._has_published = bool(value)
            key = hosts.key("waits", self.process)
            hosts.connection.requests.submit(lambda store: store.set(key, value))

    def published(self, topic: Topic, process: int) -> bytes:
        """Return the latest value of `process`; that of another host may be a second old."""
        hosts = self._hosts
        if hosts is None:
            return self._local.published(topic, process)
        if topic == "reform":
            return hosts.published(process)
        if hosts.roster.host_of[process] == hosts.connection.host:
            return self._local.published(topic, hosts.roster.local[process])
        if topic != "waits" or not self._has_published:
            return b""  # only a rank that has published its own long wait reads from other hosts
        now = time.monotonic()
        if process not in self._published or now - self._published[process][0] >= _READ_EVERY:
            key = hosts.key("waits", process)
            value = b""
            with contextlib.suppress(StoreGone):
                value = hosts.connection.requests.ask(lambda store: read_key(store, key), _LEAVING)
            self._published[process] = now, value
        return self._published[process][1]

    def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited = NOTHING) -> bool:
        """Look again and again, without boards at the store or the files of this host."""
        if awaited.boards:
            return super().wait(ready, until, awaited)
        return self._processes.wait(ready, until)

    def state(self, process: int) -> State:
        """Return the state of `process`."""
        return self._processes.state(process)

    def arrived(self) -> list[int]:
        """Return the processes that wait to join."""
        return self._processes.arrived()

    # -- the link's thread ----------------------------------------------------------------------

    def _beat(self, store: Store) -> None:
        """Send this host's heartbeat, and publish the end of ranks that died on it."""
        hosts = self._hosts
        if hosts is None:
            return
        liveness = hosts.connection.liveness
        hosts.connection.heartbeat.beat(store)
        hosts.look_for_arrivals(store)
        for process, of_world in hosts.here.items():
            state = liveness.peek(process)
            if of_world != hosts.own and state == "lost":
                self._publish_end_of(store, process, "lost")
                store.set(hosts.key("left", of_world), "")
            elif state == "finished":
                since = self._finished_since.setdefault(process, time.monotonic())
                if time.monotonic() - since >= _EXIT_GRACE:
                    self._publish_end_of(store, process, "finished")
        if hosts.own in hosts.members:  # else it waits to join, and has no rank
            key = f"{self._placement.token}/rank/{self.topology.rank}"
            store.set(key, json.dumps(self._describe_rank()))

    def _describe_rank(self) -> RankDescription:
        boards = [board.describe() for board in list(self._boards)]
        frames: list[dict[str, Any]] = []
        if not any(wait[0] for *_, wait, _ in boards):
            main = threading.main_thread().ident
            frame = sys._current_frames().get(main or 0)  # pyright: ignore[reportPrivateUsage]
            while frame is not None and len(frames) < _MOST_FRAMES:
                code = frame.f_code
                about = {"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno}
                frames.append(about)
                frame = frame.f_back
        return RankDescription(os.getpid(), time.monotonic(), boards, frames)

    def _publish_end_of(self, store: Store, process: int, state: State) -> None:
        """Publish to the other hosts how the rank that is this process of the host has ended."""
        for board in list(self._boards):
            rank = board.local_processes.get(process)
            if rank is not None and (process, board) not in self._ends_published:
                self._ends_published.add((process, board))
                board.publish_end(store, MemberEnd(rank, board.local.rounds_of(rank), state))

    # -- leaving --------------------------------------------------------------------------------

    def close(self, failure: bytes | None = None) -> None:
        """Publish on all hosts how this rank ends. A rank that serves the store leaves last."""
        hosts = self._hosts
        normally = failure is None and not (
            self._local.is_broken() or any(board.is_broken for board in self._boards)
        )
        if hosts is not None:
            connection = hosts.connection
            with contextlib.suppress(StoreGone, RuntimeError):
                connection.requests.ask(
                    lambda store: self._publish_end(store, hosts, failure), _LEAVING
                )
            if connection.endpoint.served_by_rank_0 and hosts.own == 0:
                with contextlib.suppress(StoreGone, RuntimeError):
                    self._await_others(hosts, failed=failure is not None)
        self._close_links()
        for board in self._boards:
            board.close()
        # Before the default group is closed: that may wait for ranks that wait for this one.
        self._local.publish_end(failure)
        try:
            self._default.close(normally=normally)
        finally:  # and after: the group's store may be in the directory that is removed now
            self._local.close(failure)
            self._release()

    def _publish_end(self, store: Store, hosts: Processes, failure: bytes | None) -> None:
        liveness = self._local.liveness
        mates = [process for process in hosts.here if process != liveness.process]
        if failure is None and any(liveness.peek(process) == "alive" for process in mates):
            # They see how this process ends, which it does not know itself: with which exit code.
            hosts.leave(store)
            return
        for process in mates:
            if liveness.peek(process) == "finished":  # and no rank will be here to publish it
                self._publish_end_of(store, process, "finished")
        state: State = "finished" if failure is None else "failed"
        for board in self._boards:
            text = (failure or b"").decode()
            board.publish_end(
                store, MemberEnd(self.topology.rank, board.posted, state, failure=text)
            )
        hosts.leave(store)

    def _await_others(self, hosts: Processes, *, failed: bool) -> None:
        """Return when every other rank has left, or is on a host that is gone.

        :raises StoreGone: if there is no store any more.
        """
        connection, host_of = hosts.connection, hosts.roster.host_of
        heartbeat = connection.heartbeat
        left = [process for process in hosts.members if process != hosts.own]
        begin = warned = time.monotonic()

        def look(store: Store) -> list[int]:
            still = [process for process in left if not store.check([hosts.key("left", process)])]
            heartbeat.look(store, {host_of[process] for process in still} - {connection.host})
            return [s for s in still if heartbeat.silence(host_of[s]) < heartbeat.limit]

        while True:
            left = connection.requests.ask(look, heartbeat.limit)
            now = time.monotonic()
            if not left or (failed and now - begin > _FAILED_LEAVING):
                return
            if now - warned > self.settings.warn_after:
                warned = now
                others = [hosts.members.index(process) for process in left[:8]]
                what = f"rank {self.topology.rank} has finished, and serves the store for ranks"
                logging.getLogger("syncprims").warning(f"{what} {others}")
            time.sleep(min(0.2, 0.005 + (now - begin) / 10))

    def abandon(self) -> None:
        """Release everything in a forked child: the threads are not there."""
        for board in self._boards:
            board.close()
        if self._hosts is not None:
            self._hosts.connection.probe.close()
        self._default.abandon()
        self._local.abandon()
        self._boards.clear()

    def _close_links(self) -> None:
        for link in self._links:
            link.close()

    def _release(self) -> None:
        self._close_links()
        self._boards.clear()
        if self._hosts is not None:
            self._hosts.connection.probe.close()
        if self._endpoint is not None:
            self._endpoint.kept = None


class GlooBackend(TorchBackend):
    """The torch backend, with bulk data through Gloo."""

    name = "gloo"


class NcclBackend(TorchBackend):
    """The torch backend, with bulk data through NCCL: every rank has a CUDA device."""

    name = "nccl"
