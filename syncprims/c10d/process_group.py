"""A process group of torch whose collectives are rounds at a board."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch

from syncprims._data import LARGE, REDUCED_WHOLE, values
from syncprims._data.arrays import empty_array, raw
from syncprims._data.plane import DataPlane
from syncprims._data.reduction import combine
from syncprims._protocol.call_site import notes_of
from syncprims._protocol.rounds import RoundSequence
from syncprims._world.runtime import find_world, leave_group_world
from syncprims._world.world import RunningWorld
from syncprims.errors import RankMismatch, SyncError, WorldClosed, name_ranks
from syncprims.interface import Mark, Note

from . import torch_internals as internals
from .group_world import join_group_world
from .point_to_point import PointToPoint
from .private_names import NAMES
from .tensors import OutputTensors, describe, items_of, nothing
from .torch_internals import BETWEEN, NAME, ProcessGroup, finished_work, make_backend_error

Tensors = torch.Tensor | Sequence[torch.Tensor]
M = TypeVar("M", bound="Callable[..., Any]")


def create_process_group(options: Any, backend_options: object = None) -> SyncProcessGroup:
    """Return the process group that c10d asks for.

    The default group, which says nothing of global ranks, finds or starts the world. Others live in
    the world of this rank.
    """
    ranks, started = list(options.global_ranks_in_group), False
    world = find_world()
    if not ranks:
        ranks = list(range(options.group_size))
        world, started = join_group_world(options.store, options.group_rank, options.group_size)
    elif world is None:
        raise WorldClosed(
            f"new_group(backend={NAME!r}) on a rank without a world: open the default group with "
            f"init_process_group({NAME!r}), and call new_group() before destroy_process_group()"
        )
    return SyncProcessGroup(world, ranks, options, started=started)


class _Options(NamedTuple):
    """The arguments of a call other than its tensors."""

    op: str  #: the name of a reduction
    root: Any  #: a group rank
    limit: float | None  #: seconds


def _collective(title: str, tensors: int = 1, shown: int = 0) -> Callable[[M], M]:
    """Make a method of ``(options, *arguments)`` that of a collective, which returns its `Work`.

    The first arguments, so many as `tensors`, are given as they are. Profilers see the method with
    the shapes of argument number `shown`.
    """

    def decorate(method: M) -> M:
        @_recorded(title, shown)
        @functools.wraps(method)
        def call(self: SyncProcessGroup, *args: object, **named: object) -> Any:
            options = self.read_options(*args[tensors:], *named.values())
            method(self, options, *args[:tensors])
            return finished_work(_listed(args[0]) if tensors else None)

        return cast("M", call)

    return decorate


def _recorded(title: str, shown: int = 0) -> Callable[[M], M]:
    """Show a method to profilers and modes of torch; the compiler of torch does not trace it.

    Its errors are also those that torch's own backends raise.
    """

    def decorate(method: M) -> M:
        @internals.keep_from_compiler
        @functools.wraps(method)
        def call(self: SyncProcessGroup, *args: object, **named: object) -> Any:
            try:
                if internals.needs_dispatcher(args):
                    several = method.__name__.endswith("_single") and isinstance(args[0], list)
                    name = method.__name__ + ("_coalesced" if several else "")
                    plain = functools.partial(call, self)
                    return internals.call_by_dispatcher(self, name, args, named, plain)
                if not NAMES["_profiler_enabled"]():
                    return method(self, *args, **named)
                with internals.recorded(
                    f"{self.served_as}:{title}", internals.flattened(args[shown : shown + 1])
                ):
                    return method(self, *args, **named)
            except SyncError as error:
                make_backend_error(error)
                raise

        return cast("M", call)

    return decorate


@internals.with_old_names
class SyncProcessGroup(ProcessGroup):
    """A group of ranks whose calls are rounds at a board of their own.

    The methods are those that c10d calls. Every call finishes before it returns, and returns a
    finished `Work`; only sends and receives may go on. A call that differs between ranks, and a
    rank that does not come, raise as any call of this library.
    """

    def __init__(
        self, world: RunningWorld, ranks: list[int], options: Any, *, started: bool
    ) -> None:
        """Make the group of these world ranks; `world` ends with it if it was `started` for it."""
        super().__init__(options.group_rank, len(ranks))
        self._world, self._started = world, started
        self._ranks = ranks  # world ranks, by group rank
        self.group_name = str(options.group_id)
        self.served_as = NAME  #: the backend that the program has asked for: its profilers show it
        self._store = options.store
        members = tuple(sorted(ranks))
        self._me = options.group_rank
        self._index_of = [members.index(rank) for rank in ranks]  # by group rank: on the board
        self._in_order = self._index_of == list(range(len(ranks)))
        self._rounds = world.open_rounds(members, f"group {self.group_name}", BETWEEN)
        board = self._rounds.board.name
        self._point_to_point = PointToPoint(world, board, ranks, options.group_rank)
        self._left = False
        self.pickling_error: Exception | None = None  #: of what the next call would send
        self._timeout: float | None = None
        self.set_timeout(options.timeout)

    def __repr__(self) -> str:
        return f"<syncprims process group {self.group_name!r} of ranks {self._ranks}>"

    # -- what torch asks about a group ----------------------------------------------------------

    def name(self) -> str:
        """Return the name of this backend, also where it serves under another one.

        By the names of its own backends, torch's C++ code looks for their options.
        """
        return NAME

    getBackendName = name

    def _get_backend_name(self) -> str:
        """Return the name that the program asked for: by it, torch's Python code chooses calls."""
        return self.served_as

    #: In worlds of tests: see `as_gloo.check`.
    limits: Callable[[str, str | None, Sequence[torch.Tensor]], str] | None = None

    #: What torch has called the group, and what the program has. They hide properties of C++.
    group_name: str = ""
    group_desc: str = "undefined"

    def getGroupName(self) -> str:
        """Return the name that torch has given to the group."""
        return self.group_name

    def getGroupDesc(self) -> str:
        """Return the name that the program has given the group."""
        return self.group_desc

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    setGroupName: Callable[..., None] = _set_group_name
    setGroupDesc: Callable[..., None] = _set_group_desc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: object) -> SyncProcessGroup:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def _get_sequence_number_for_group(self) -> int:
        return self._rounds.board.posted

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: rounds are counted already."""

    def get_group_store(self) -> Any:
        """Return the store that the group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Make `timeout` that of every later call."""
        self._timeout = self._seconds(timeout)

    def shutdown(self) -> None:
        """Leave the group; the world ends with it, if the default group has started that.

        What the members share ends with the last one that leaves.
        """
        world, rounds = self._world, self._rounds
        if find_world() is world and not self._left:
            self._left = True
            why = functools.partial(_destroyed, self.group_name, self._ranks)
            self._point_to_point.close(why)
            world.close_rounds(rounds, why)
        if self._started:
            self._started = False
            leave_group_world(world)

    abort = shutdown

    def _start_coalescing(self, device: object) -> None:
        """Do nothing: each call finishes by itself."""

    def _end_coalescing(self, device: object) -> Any:
        return finished_work()

    start_coalescing: Callable[..., None] = _start_coalescing
    end_coalescing: Callable[..., Any] = _end_coalescing

    # -- one call -------------------------------------------------------------------------------

    def _seconds(self, timeout: timedelta) -> float | None:
        """Return a timeout of torch in seconds; None if it says nothing.

        The user's setting replaces the defaults of torch. In the world of a test these say nothing,
        as waits that can never end are found without them.
        """
        seconds, rounds = timeout.total_seconds(), self._rounds
        if seconds > 0 and timeout in internals.default_timeouts():
            return rounds.settings.timeout or (None if rounds.board.observed else seconds)
        return seconds if seconds > 0 else None

    def _limit(self, timeout: timedelta | None) -> float | None:
        """Return the timeout of one call, by default that of the group."""
        seconds = None if timeout is None else self._seconds(timeout)
        return self._timeout if seconds is None else seconds

    def read_options(self, *given: object) -> _Options:
        """Read what c10d gives: objects with options, or single values, in any order."""
        op = root = timeout = None
        for value in given:
            if (limit := getattr(value, "timeout", None)) is not None:
                op, root = getattr(value, "reduceOp", op), getattr(value, "rootRank", root)
                timeout = timeout or limit
            elif isinstance(value, timedelta):
                timeout = value
            elif isinstance(value, int):
                root = value
            elif value is not None:
                op = value
        return _Options(
            "sum" if op is None else internals.reduction_of(op), root, self._limit(timeout)
        )

    def _note(
        self,
        kind: str,
        what: str | None = None,
        root: int | None = None,
        op: str | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> Note:
        refused, known = "", root is None or 0 <= root < len(self._ranks)
        try:
            what = f"{what}{self._limit_of(kind, op, tensors)}" if tensors else what
        except ValueError as reason:
            refused = str(reason)
        src = self._ranks[root] if root is not None and known else None
        note = self._rounds.note(kind, what, src, op)
        compares = self._rounds.settings.strict or self._rounds.observed
        if compares and internals.is_called_by("Join.__exit__"):  # for the ranks that have inputs
            note = notes_of(kind, what, src, op, f"join at {note.label.site}")[0]
        error, self.pickling_error = self.pickling_error, None
        if error is not None:
            self._fail(note, error)
        if not known:
            refused = f"root {root} is not a rank of a group of {len(self._ranks)} ranks"
        if refused:
            self._refuse(note, refused)
        return note

    def _limit_of(self, kind: str, op: str | None, tensors: Sequence[torch.Tensor]) -> str:
        """Check a call against what the backend can that the program has asked for."""
        limits = type(self).limits  # it is no method
        return limits(kind, op, tensors) if limits and "gloo" in self.served_as else ""

    def _refuse(self, note: Note, why: str) -> NoReturn:
        """Raise that a call of this rank is impossible; the others get a `PeerFailed`."""
        self._fail(note, InvalidCall(f"{note.label}: {why}"))

    def _fail(self, note: Note, error: Exception) -> NoReturn:
        """Raise `error`, with which this rank has failed; the others get a `PeerFailed`."""
        self._rounds.fail(note.label, error)
        raise error

    def _check(
        self,
        note: Note,
        one: torch.Tensor,
        each: Sequence[torch.Tensor],
        of_size: Collection[int] | None = None,
    ) -> None:
        """Accept a tensor for each rank, of the dtype of `one`; of its size, too, for `of_size`.

        These are group ranks, by default all.
        """
        count = len(self._ranks)
        if len(each) != count:
            given = f"the number of tensors given is {len(each)}, and the group has {count} ranks"
            self._refuse(note, f"{given}; give one for each")
        for rank, other in enumerate(each):
            sized = of_size is None or rank in of_size
            if other.dtype != one.dtype or (sized and other.numel() != one.numel()):
                self._refuse(
                    note,
                    f"the tensor for rank {self._ranks[rank]} is {describe([other])}, and that of "
                    f"the call is {describe([one])}; give tensors of one "
                    f"{'size and dtype' if sized else 'dtype'}",
                )

    def _check_whole(self, note: Note, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Accept a tensor `whole` that is as large as one like `part` for each rank."""
        size = len(self._ranks) * part.numel()
        if (whole.numel(), whole.dtype) != (size, part.dtype):
            shown = f"is {describe([part])}, and that of all ranks is {describe([whole])}"
            why = f"the tensor of one rank {shown}; give one of {size} items of that dtype"
            self._refuse(note, why)

    def _op_for(self, note: Note, op: str, tensor: torch.Tensor) -> str:
        """Return the reduction that keeps the dtype of `tensor`, as c10d does."""
        if op in ("band", "bor", "bxor") and (tensor.is_floating_point() or tensor.is_complex()):
            self._refuse(note, "it works on the bits of integers and bools; give tensors of those")
        if tensor.dtype is torch.bool:
            return {"sum": "bor", "prod": "band"}.get(op, op)
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return "floor_mean" if op == "mean" and whole else op

    def _by_index(self, of_ranks: Sequence[Any]) -> Sequence[Any]:
        """Return items in the order of the board, from the order of group ranks."""
        if self._in_order:
            return of_ranks
        found: list[Any] = [None] * len(of_ranks)
        for index, one in zip(self._index_of, of_ranks, strict=True):
            found[index] = one
        return found

    # -- collectives ----------------------------------------------------------------------------

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Any:
        """Return when every member has come."""
        given: Any = getattr(opts, "timeout", opts) if timeout is None else timeout
        self._meet("barrier", given)
        return finished_work()

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every member has come; all missing ones are named in any case."""
        self._meet("monitored_barrier", timeout)

    def _meet(self, kind: str, timeout: timedelta | None) -> None:
        try:
            self._rounds.meet(self._note(kind), self._limit(timeout))
        except SyncError as error:
            make_backend_error(error)
            raise

    @_collective("all_reduce")
    def allreduce(self, options: _Options, tensors: Tensors) -> None:
        """Reduce each tensor in place."""
        self._reduce("all_reduce", options, tensors, None)

    @_collective("all_reduce")
    def allreduce_coalesced(self, options: _Options, tensors: Tensors) -> None:
        """Reduce each tensor in place."""
        self._reduce("all_reduce_coalesced", options, tensors, None)

    @_collective("reduce")
    def reduce(self, options: _Options, tensors: Tensors) -> None:
        """Reduce each tensor into that of the root."""
        self._reduce("reduce", options, tensors, options.root)

    def _reduce(self, kind: str, options: _Options, tensors: Tensors, root: int | None) -> None:
        for tensor in _listed(tensors):
            what = ("sparse " if tensor.is_sparse else "") + describe([tensor])
            note = self._note(kind, what, root, options.op, [tensor])
            plain = tensor.detach()
            op = self._op_for(note, options.op, tensor)
            if tensor.is_sparse:
                plain = plain.coalesce()
                total = values.all_reduce(self._rounds, note, plain, op, None, options.limit)
                with torch.no_grad():  # a detached sparse tensor would keep its own indices
                    tensor.copy_(total.coalesce())
            elif root in (None, self._me):
                with OutputTensors(tensor) as (out,):
                    values.all_reduce(self._rounds, note, items_of(plain), op, out, options.limit)
            else:
                values.all_reduce(self._rounds, note, items_of(plain), op, None, options.limit)

    @_collective("broadcast")
    def broadcast(self, options: _Options, tensors: Tensors) -> None:
        """Fill the tensors with those of the root."""
        for tensor in _listed(tensors):
            note = self._note("broadcast", describe([tensor]), options.root, None, [tensor])
            src = self._ranks[options.root]
            if options.root == self._me:
                values.broadcast(self._rounds, note, items_of(tensor), src, None, options.limit)
            else:
                with OutputTensors(tensor) as (out,):
                    values.broadcast(self._rounds, note, None, src, out, options.limit)

    @_collective("all_gather", 2, 1)
    def allgather(self, options: _Options, outputs: object, inputs: object) -> None:
        """Fill the lists of outputs with the inputs of all members, by rank."""
        for rooms, mine in _pairs(outputs, inputs):
            note = self._note("all_gather", describe([mine]), tensors=[mine])
            self._gather(note, options, mine, rooms)

    @_collective("all_gather", 2, 1)
    def allgather_coalesced(self, options: _Options, outputs: Any, inputs: Any) -> None:
        """Fill ``outputs[rank]`` with all inputs of that rank."""
        for number, mine in enumerate(inputs):
            note = self._note("all_gather_coalesced", describe([mine]), tensors=[mine])
            rooms = [of_rank[number] for of_rank in outputs if number < len(of_rank)]
            self._gather(note, options, mine, rooms)

    @_collective("gather", 2, 1)
    def gather(self, options: _Options, outputs: object, inputs: object) -> None:
        """Fill the outputs of the root with the inputs of all members."""
        (mine,) = _listed(inputs)
        note = self._note("gather", describe([mine]), options.root, None, [mine])
        if options.root == self._me:
            self._gather(note, options, mine, _nested(outputs))
        else:
            self._gather_items(note, options, mine, [None] * len(self._ranks))

    def _gather(
        self, note: Note, options: _Options, mine: torch.Tensor, outputs: Sequence[torch.Tensor]
    ) -> None:
        self._check(note, mine, outputs)
        with OutputTensors(*outputs) as items:
            self._gather_items(note, options, mine, items)

    def _gather_items(
        self, note: Note, options: _Options, mine: torch.Tensor, outs: list[Any]
    ) -> None:
        values.gather(self._rounds, note, items_of(mine), options.limit, self._by_index(outs))

    @_collective("_all_gather_base", 2, 1)
    def all_gather_single(self, options: _Options, outputs: object, inputs: object) -> None:
        """Fill each output with the inputs of all members, one after the other."""
        for output, mine in zip(_listed(outputs), _listed(inputs), strict=True):
            note = self._note("all_gather_into_tensor", describe([mine]), tensors=[mine])
            self._check_whole(note, mine, output)
            with OutputTensors(output) as (items,):
                self._gather_items(note, options, mine, self._parts(items))

    all_gather_single_coalesced = all_gather_single

    def _parts(self, items: Any) -> list[Any]:
        """Return the items of each rank, which all have the same number."""
        size = len(items) // len(self._ranks)
        return [items[k * size : (k + 1) * size] for k in range(len(self._ranks))]

    @_collective("scatter", 2, 1)
    def scatter(self, options: _Options, outputs: object, inputs: object) -> None:
        """Fill the output with the input that the root has for this rank."""
        (output,) = _listed(outputs)
        given = _nested(inputs) if options.root == self._me else []
        note = self._note("scatter", describe([output]), options.root, None, [output, *given])
        parts = rooms = [nothing()] * len(self._ranks)
        if options.root == self._me:
            self._check(note, output, given)
            parts = [items_of(part) for part in given]
        with OutputTensors(output) as (room,):
            rooms = [room if rank == options.root else nothing() for rank in range(len(rooms))]
            self._exchange(note, options, parts, rooms)

    @_collective("reduce_scatter", 2, 1)
    def reduce_scatter(self, options: _Options, outputs: object, inputs: object) -> None:
        """Fill the outputs with the reduction of what all members have for this rank."""
        for parts, output in _pairs(inputs, outputs):
            tensors = [output, *parts]
            note = self._note("reduce_scatter", describe(parts), None, options.op, tensors)
            self._check(note, output, parts, of_size=[self._me])
            self._reduce_scatter(note, options, output, [items_of(part) for part in parts])

    @_collective("_reduce_scatter_base", 2, 1)
    def reduce_scatter_single(self, options: _Options, outputs: object, inputs: object) -> None:
        """Fill each output with the reduction of the parts that all members have for this rank."""
        for output, mine in zip(_listed(outputs), _listed(inputs), strict=True):
            note = self._note("reduce_scatter_tensor", describe([mine]), None, options.op, [mine])
            self._check_whole(note, output, mine)
            items = items_of(mine)
            if items.nbytes > REDUCED_WHOLE:
                self._reduce_scatter(note, options, output, self._parts(items))
                continue
            op = self._op_for(note, options.op, mine)
            total = values.all_reduce(self._rounds, note, items, op, None, options.limit)
            with OutputTensors(output) as (out,):
                out[...] = self._parts(total)[self._me]

    reduce_scatter_single_coalesced = reduce_scatter_single

    def _reduce_scatter(
        self, note: Note, options: _Options, output: torch.Tensor, parts: list[Any]
    ) -> None:
        op, own = self._op_for(note, options.op, output), parts[self._me]
        rooms = list(empty_array(own, (len(parts), len(own)), own.dtype))
        self._exchange(note, options, parts, rooms)
        with OutputTensors(output) as (out,):
            combine(self._by_index(rooms), out, op)

    # -- all-to-all -----------------------------------------------------------------------------

    @_collective("all_to_all", 4, 1)
    def all_to_all_single(
        self,
        options: _Options,
        output: torch.Tensor,
        mine: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> None:
        """Send the parts of `mine` to the members, and fill `output` with theirs."""
        note = self._note("all_to_all_single", str(mine.dtype)[6:], tensors=[output, mine])
        if output.dtype != mine.dtype:
            self._refuse(note, f"the output is of {str(output.dtype)[6:]}; give one of that dtype")
        with OutputTensors(output) as (items,):
            try:
                parts = _split(items_of(mine), mine, input_sizes, len(self._ranks), "input")
                rooms = _split(items, output, output_sizes, len(self._ranks), "output")
            except ValueError as error:
                self._refuse(note, str(error))
            self._exchange(note, options, parts, rooms)

    @_collective("all_to_all", 2, 1)
    def alltoall(self, options: _Options, outputs: Any, inputs: Any) -> None:
        """Send the inputs to the members, and fill the outputs with theirs."""
        note = self._note("all_to_all", str(inputs[0].dtype)[6:], tensors=inputs)
        for tensors in inputs, outputs:
            self._check(note, inputs[0], tensors, of_size=())
        with OutputTensors(*outputs) as rooms:
            self._exchange(note, options, [items_of(one) for one in inputs], rooms)

    def _exchange(
        self, note: Note, options: _Options, parts: Sequence[Any], rooms: Sequence[Any]
    ) -> None:
        """Fill ``rooms[rank]``, contiguous, with the part that the group rank has for this one.

        Each member sends the sizes of its parts and rooms in a note, and with them small parts.
        Larger ones go through the transport.

        :raises RankMismatch: on all members, if a part does not fit into its room.
        """
        rounds = self._rounds
        try:
            transport = DataPlane.of(rounds).transport()
        except BaseException as error:  # there is no space for it
            rounds.fail(note.label, error)
            raise
        parts, rooms = self._by_index(parts), self._by_index(rooms)
        count, me = len(parts), rounds.index
        form, own_sizes = f"<{2 * count}Q", [array.nbytes for array in (*parts, *rooms)]
        in_note = transport is None or sum(own_sizes[:count]) < LARGE
        payload = b"".join([struct.pack(form, *own_sizes), *map(raw, parts if in_note else ())])

        def read(notes: Sequence[Note]) -> None:
            sizes = [struct.unpack_from(form, other.payload) for other in notes]
            self._check_sizes(note, sizes)
            if all(other.mark for other in notes):
                for other, row, room in zip(notes, sizes, rooms, strict=True):
                    begin = 16 * count + sum(row[:me])
                    raw(room)[:] = other.payload[begin : begin + row[me]]
            else:
                assert transport is not None, "all members have one, or none has"
                sequence = RoundSequence(rounds, note, options.limit)
                transport.exchange(sequence, parts, rooms, [row[:count] for row in sizes])

        mark = Mark.INLINE if in_note else Mark.NONE
        rounds.meet(Note(note.label, mark, payload), options.limit, read)

    def _check_sizes(self, note: Note, sizes: Sequence[Sequence[int]]) -> None:
        """Accept parts that fit into their rooms.

        ``sizes[i]`` are the bytes of the parts of member i of the board, then those of its rooms.
        """
        members = self._rounds.members
        for i, row in enumerate(sizes):
            for j, other in enumerate(sizes):
                if row[j] != other[len(members) + i]:
                    self._rounds.raise_shared_error(
                        RankMismatch(
                            f"{note.label}: rank {members[i]} sends {row[j]} bytes to rank "
                            f"{members[j]}, which has room for {other[len(members) + i]}; let the "
                            f"split sizes of both agree",
                            rank=self._rounds.rank,
                            call=str(note.label),
                            arrived=list(members),
                        )
                    )

    # -- point to point -------------------------------------------------------------------------

    @_recorded("send")
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        """Send a tensor; the `Work` is over when it may be changed."""
        return self._transfer("send", tensors, self._me, dst, tag)

    @_recorded("recv")
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        """Receive into a tensor; the `Work` is over when it is filled."""
        return self._transfer("recv", tensors, src, self._me, tag)

    def _transfer(self, kind: str, tensors: Tensors, src: int, dst: int, tag: int) -> Any:
        (tensor,) = _listed(tensors)
        try:
            self._limit_of(kind, None, [tensor])
        except ValueError as error:
            label = self._rounds.note(kind, describe([tensor])).label
            raise InvalidCall(f"{label}: {error}") from None
        return self._point_to_point.transfer(tensor, src, dst, tag, self._timeout)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Refuse to receive from any rank, as NCCL does.

        :raises ValueError: that says so.
        """
        raise ValueError(
            f"recv() and irecv() without src= receive from any rank, which the c10d backend "
            f"{NAME!r} cannot: name the rank that sends, as src="
        )


class InvalidCall(ValueError, RuntimeError):
    """A call of this rank is impossible; torch's own backends raise a `RuntimeError`."""


def _destroyed(name: str, ranks: Sequence[int]) -> SyncError:
    return WorldClosed(
        f"process group {name!r} of ranks {name_ranks(ranks)} is destroyed: make its calls before "
        f"destroy_process_group()"
    )


def _listed(tensors: object) -> list[Any]:
    """Return the tensors as a list; c10d gives one, or a list."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _nested(tensors: object) -> list[Any]:
    """Return one list of tensors; c10d gives it as it is, or in a list of one."""
    found = _listed(tensors)
    return _listed(found[0]) if found and isinstance(found[0], list | tuple) else found


def _pairs(lists: Any, tensors: Any) -> list[tuple[list[Any], Any]]:
    """Return the pairs of a list of tensors and a tensor, of which c10d gives one or several."""
    if not isinstance(tensors, list | tuple):
        return [(_listed(lists), tensors)]
    return [(_listed(one), tensor) for one, tensor in zip(lists, tensors, strict=True)]


def _split(
    items: Any, tensor: torch.Tensor, sizes: Sequence[int] | None, count: int, what: str
) -> list[Any]:
    """Return the items of the parts of `tensor`, which is split along its first dimension.

    :raises ValueError: if it cannot be split so.
    """
    rows = tensor.size(0) if tensor.dim() else tensor.numel()
    if not sizes:
        if rows % count:
            raise ValueError(
                f"an {what} of {rows} rows cannot be split evenly between {count} ranks; give "
                f"{what} split sizes"
            )
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ValueError(
            f"{what} split sizes {list(sizes)} for {count} ranks: their sum must be the {rows} "
            f"rows of the {what}"
        )
    width = len(items) // rows if rows else 0
    parts: list[Any] = []
    begin = 0
    for size in sizes:
        parts.append(items[begin * width : (begin + size) * width])
        begin += size
    return parts
