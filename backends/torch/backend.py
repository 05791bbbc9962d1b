"""Ranks on one host or many, as torchrun and its like start them: the backend of training jobs.

The control plane is two-level. Ranks that share memory meet at the file backend's boards, and hosts
meet at the rendezvous store; a run on one host is done with the store once all have come. No device
and no process group is touched by a barrier, a flag or a small object.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed

from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.interface import Backend, Board, Settings, Topology, own_device_index

from ..file.backend import FileBackend
from .board import Ties, TwoLevelBoard
from .decisions import End
from .default_group import DefaultGroup
from .departures import Departures
from .engines import GlooEngine, NcclEngine
from .heartbeat import BEATS, Heartbeat
from .host_state import Relay
from .rendezvous import Census, Host, devices, take_census, unreachable
from .store import TRY_AGAIN, StoreSource, check_findable, find_store
from .store_link import StoreGone, StoreLink

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

dist: Any = torch.distributed  # its types leave out what its documentation names

_LAST_WORD = 2.0  # seconds to tell the other hosts how this rank ends
_EXIT_GRACE = 6.0  # for a rank of this host that waits to say how another one ended
_WORD_EVERY = 1.0  # seconds between two looks at another host's published words


class TorchBackend(Backend):
    """A rank of a run that torchrun, SLURM, MPI or the program itself has started."""

    name = "torch"
    spans_hosts = True
    detects_death = True
    has_process_group = True
    needs: ClassVar[str | None] = None  #: the engine that was asked for by name

    def __init__(self, topology: Topology, settings: Settings) -> None:
        self.check(topology, settings)
        super().__init__(topology, settings)
        self._boards: list[TwoLevelBoard] = []
        self._ties: Ties | None = None  # to other hosts, if there are any
        self._heartbeat: Heartbeat | None = None
        self._word_said = False
        self._left_since: dict[int, float] = {}  # ranks of this host that have finished
        self._spoken_for: set[tuple[int, TwoLevelBoard]] = set()
        self._default = DefaultGroup()
        self._heard: dict[int, tuple[float, bytes]] = {}
        self._source = find_store(topology, settings) if topology.world_size > 1 else None
        self._links: tuple[StoreLink, ...] = ()
        if self._source is None:
            everybody = list(range(topology.world_size))
            here = Host("here", everybody, devices() >= topology.world_size)
            self._census = Census(topology.run_id or "", [here])
            self._local = FileBackend(topology, settings)
            return
        try:
            self._join(self._source)
        except BaseException:
            self._let_go()
            raise

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Refuse a torch that cannot, and a run of which nobody knows where it meets."""
        if not dist.is_available():
            raise BackendUnavailable(
                "this build of torch has no torch.distributed; install another, or use "
                "SYNCPRIMS_BACKEND=file on one host"
            )
        if cls.needs == "nccl" and not torch.cuda.is_available():
            raise BackendUnavailable(
                f"backend 'nccl' needs a CUDA device, and rank {topology.rank} has none; use "
                f"SYNCPRIMS_BACKEND=torch, which takes NCCL only where there is one"
            )
        _check_default_group(topology)
        if topology.world_size > 1:
            check_findable(topology, settings)

    def _join(self, source: StoreSource) -> None:
        """Learn who shares this host, and sit down with them."""
        deadline = time.monotonic() + self.settings.join_timeout
        while True:
            speaker, waiter = self._dial(source)
            try:
                self._census = census = take_census(
                    (speaker, waiter), source, self.topology, self.settings, deadline
                )
                break
            except StoreGone:
                # It was served by a world before this one, perhaps, and went with it.
                self._hang_up()
                time.sleep(TRY_AGAIN)
        top = self.topology
        host_of = census.host_of
        mine = census.hosts[host_of[top.rank]]
        if top.launcher == "torch.distributed":  # which knows no hosts
            self.topology = top = top._replace(
                local_rank=mine.ranks.index(top.rank),
                local_world_size=len(mine.ranks),
                node_rank=host_of[top.rank],
                num_nodes=len(census.hosts),
            )
        if len(census.hosts) == 1:
            self._local = FileBackend(top._replace(run_id=census.token), self.settings)
            self._hang_up()
            return
        seat = mine.ranks.index(top.rank)
        place = Topology(seat, len(mine.ranks), seat, len(mine.ranks), 0, 1, top.launcher)
        run_id = f"{census.token}-{host_of[top.rank]}"
        self._local = FileBackend(place._replace(run_id=run_id), self.settings)
        try:
            self._tie_up(source, census, speaker, waiter)
        except BaseException:
            self._local.close()
            raise

    def _tie_up(
        self, source: StoreSource, census: Census, speaker: StoreLink, waiter: StoreLink
    ) -> None:
        """Take up the ties to other hosts, and give them the first sign of life."""
        host_of = census.host_of
        host = host_of[self.topology.rank]
        with self._local.table() as table:
            heartbeat = Heartbeat(table, census.token, host, self.settings.heartbeat)
        self._ties = Ties(
            seats=self._local.seats,
            host=host,
            host_of=host_of,
            names=[host.name for host in census.hosts],
            store=source.address,
            speaker=speaker,
            waiter=waiter,
            heartbeat=heartbeat,
            ring=self._ring,
        )
        self._departures = Departures(census.token, host_of)
        self._heartbeat = heartbeat
        try:
            speaker.ask(heartbeat.beat, self.settings.join_timeout)
        except StoreGone as error:
            raise unreachable(self.topology, source, error) from error

    def _dial(self, source: StoreSource) -> tuple[StoreLink, StoreLink]:
        every = self.settings.heartbeat / BEATS
        speaker = StoreLink(  # which is asked first, so that one of the two has to wait
            "speaker", source.connect, before=source.await_served, every=every, pulse=self._pulse
        )
        self._links = speaker, StoreLink("waiter", source.connect)
        return self._links

    @property
    def meeting_place(self) -> str:
        """The store, and the directory on this host."""
        if self._source is None:
            return self._local.meeting_place
        return f"the store at {self._source.address} and {self._local.meeting_place}"

    # -- boards -------------------------------------------------------------------------------

    def board(self, members: Sequence[int]) -> Board:
        """Return the board of `members`: on one host shared memory alone, else two-level."""
        board = self._board(members)
        if self._may_use_nccl({self._census.host_of[rank] for rank in members}):
            # Its first group takes all ranks of the world.
            board.devices = NcclEngine(members, self.topology.world_size, self._open_default)
        return board

    def _board(self, members: Sequence[int]) -> Board:
        hosts = self._census.hosts
        if len(hosts) == 1:
            return self._local.board(members)
        assert self._ties is not None
        assert self._source is not None
        here = hosts[self._ties.host].ranks
        local = [rank for rank in members if rank in here]
        seats = [here.index(rank) for rank in local]
        name = f"board-{hashlib.blake2b(repr(tuple(members)).encode(), digest_size=8).hexdigest()}"
        if len(local) == len(members):
            return self._local.board_of(local, name, seats)
        own = self._local.board_of(local, f"{name}-here", seats)
        with self._local.table() as table:
            relay = Relay(table, name, len(local), local.index(self.topology.rank))
        prefix = f"{self._census.token}/{name}"
        board = TwoLevelBoard(members, own, relay, prefix, self._ties)
        place = tuple(members).index(self.topology.rank)
        interfaces = self.settings.gloo_interfaces
        board.engine = GlooEngine(self._source, f"{prefix}/gloo", place, len(members), interfaces)
        self._boards.append(board)
        return board

    def _may_use_nccl(self, hosts: Iterable[int]) -> bool:
        """Tell whether NCCL is to serve the ranks of these hosts: it wants a device for each rank.

        Where ranks see but one device each, these may be different ones (``srun --gpus-per-task``)
        or the same: whoever names NCCL says that they differ, and else NCCL refuses them itself.
        """
        if self.needs is not None:
            return self.needs == "nccl"
        return all(self._census.hosts[host].devices for host in hosts)

    def open_process_group(self) -> None:
        """Make torch's default group if there is none: it serves DDP, and the program itself."""
        if not dist.is_initialized():
            self._open_default()

    def _open_default(self) -> None:
        """Make torch's default group, its device chosen if it is to be NCCL's."""
        top, several = self.topology, len(self._census.hosts) > 1
        store: Any
        if several:
            assert self._source is not None
            store = dist.PrefixStore(f"{self._census.token}/default", self._source.connect())
        else:
            store = dist.FileStore(str(self._local.path_for("default-group")), top.world_size)
        device: int | None = None
        if self._may_use_nccl(range(len(self._census.hosts))):
            current, count = torch.cuda.current_device(), torch.cuda.device_count()
            device = own_device_index(current, count, top.local_rank)
        self._default.open(store, top, device)

    # -- words --------------------------------------------------------------------------------

    def publish(self, word: bytes) -> None:
        """Let others read `word`, on this host and on others."""
        self._local.publish(word)
        if self._ties is not None and (word or self._word_said):
            self._word_said = bool(word)
            key = self._word_key(self.topology.rank)
            self._ties.speaker.submit(lambda store: store.set(key, word))

    def published(self, rank: int) -> bytes:
        """Return the latest word of `rank`; that of another host may be a second old."""
        ties = self._ties
        if ties is None:
            return self._local.published(rank)
        if ties.host_of[rank] == ties.host:
            return self._local.published(self._census.hosts[ties.host].ranks.index(rank))
        if not self._word_said:
            return b""  # only who waits for long, and has said so, asks another host
        now = time.monotonic()
        if now - self._heard.get(rank, (-_WORD_EVERY, b""))[0] >= _WORD_EVERY:
            key = self._word_key(rank)

            def read(store: Any) -> bytes:
                return bytes(store.get(key)) if store.check([key]) else b""

            word = b""
            with contextlib.suppress(StoreGone):
                word = ties.speaker.ask(read, _LAST_WORD)
            self._heard[rank] = now, word
        return self._heard[rank][1]

    def _word_key(self, rank: int) -> str:
        return f"{self._census.token}/word/{rank}"

    # -- the link's thread --------------------------------------------------------------------

    def _pulse(self, store: Any) -> None:
        """Give a sign of life for this host, and tell the others of ranks that died on it."""
        heartbeat, ties = self._heartbeat, self._ties
        if heartbeat is None or ties is None:
            return
        heartbeat.beat(store)
        for seat, rank in enumerate(self._census.hosts[ties.host].ranks):
            if rank != self.topology.rank and self._local.seats.is_deserted(seat):
                self._speak_for(store, rank, "lost")
                self._departures.note(store, rank)
            elif self._local.seats.has_left(seat):
                since = self._left_since.setdefault(rank, time.monotonic())
                if time.monotonic() - since >= _EXIT_GRACE:
                    self._speak_for(store, rank, "finished")

    def _speak_for(self, store: Any, rank: int, state: str) -> None:
        """Tell the other hosts how a rank of this one has ended."""
        for board in self._boards:
            if rank in board.local.members and (rank, board) not in self._spoken_for:
                self._spoken_for.add((rank, board))
                board.say_end(store, End(rank, board.rounds_of(rank), state))

    def _ring(self) -> None:
        """Wake every rank of this host."""
        assert self._ties is not None
        for seat in range(len(self._census.hosts[self._ties.host].ranks)):
            self._local.seats.bells.ring(seat)

    # -- leaving ------------------------------------------------------------------------------

    def close(self, failure: bytes | None = None) -> None:
        """Tell the other hosts and this one how this rank ends. Who serves the store goes last."""
        ties = self._ties
        in_peace = failure is None and not self._is_torn()
        if ties is not None:
            with contextlib.suppress(StoreGone, RuntimeError):
                ties.speaker.ask(lambda store: self._say_end(store, failure), _LAST_WORD)
            assert self._source is not None
            if self._source.served_by_rank_0 and self.topology.rank == 0:
                with contextlib.suppress(StoreGone, RuntimeError):
                    self._departures.await_all(
                        ties.speaker,
                        ties.heartbeat,
                        but=0,
                        hurry=failure is not None,
                        warn_after=self.settings.warn_after,
                    )
        self._hang_up()
        for board in self._boards:
            board.close()
        # Whoever waits for this rank hears of its end first: that of the group may wait for them.
        self._local.say_end(failure)
        try:
            self._default.close(in_peace=in_peace)
        finally:  # and the group's store may lie in the directory that is cleared now
            self._local.close(failure)
            self._let_go()

    def _is_torn(self) -> bool:
        return self._local.is_torn() or any(board.is_torn() for board in self._boards)

    def _say_end(self, store: Any, failure: bytes | None) -> None:
        assert self._ties is not None
        seats, own = self._local.seats, self._local.topology.rank
        mates = [s for s in range(self._local.topology.world_size) if s != own]
        if failure is None and any(seats.is_taken(seat) for seat in mates):
            # They see how this process ends, which it does not know itself: with which exit code.
            self._departures.note(store, self.topology.rank)
            return
        for seat in mates:
            if seats.has_left(seat):  # and nobody will be here to say so
                self._speak_for(store, self._census.hosts[self._ties.host].ranks[seat], "finished")
        state, text = ("finished", "") if failure is None else ("failed", failure.decode())
        for board in self._boards:
            board.say_end(store, End(self.topology.rank, board.posted, state, "", text))
        self._departures.note(store, self.topology.rank)

    def abandon(self) -> None:
        """Let go of everything in a forked child: the threads are not there."""
        for board in self._boards:
            board.close()
        self._default.abandon()
        self._local.abandon()
        self._boards.clear()

    def _hang_up(self) -> None:
        for link in self._links:
            link.close()

    def _let_go(self) -> None:
        self._hang_up()
        self._boards.clear()
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._source is not None:
            self._source.close()


class GlooBackend(TorchBackend):
    """The torch backend, with bulk data through Gloo."""

    name = "gloo"
    needs = "gloo"


class NcclBackend(TorchBackend):
    """The torch backend, with bulk data through NCCL: every rank has a CUDA device."""

    name = "nccl"
    needs = "nccl"


def _check_default_group(topology: Topology) -> None:
    """Refuse an initialized group that is not this world."""
    if not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (topology.rank, topology.world_size):
        raise ConfigurationError(
            f"torch.distributed is initialized with rank={rank} and world_size={world_size}, and "
            f"{topology.launcher} says rank={topology.rank} and world_size={topology.world_size}; "
            f"initialize it as the launcher says, or unset the launcher's variables"
        )
