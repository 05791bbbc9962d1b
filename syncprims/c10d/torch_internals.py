"""What this package does by names of torch that are not public, or not documented.

A torch that lacks one raises `BackendUnavailable` when a process group is made, or where the name
is used; nothing else of this library is affected.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed
from torch.futures import Future

import _syncprims_c10d
from syncprims._world.runtime import find_world
from syncprims.errors import SyncError

from .private_names import NAMES

dist: Any = torch.distributed  # its types leave out what its documentation names
if TYPE_CHECKING:

    class ProcessGroup:
        """The class of torch. Its types name parameters that c10d gives by their places."""

        def __init__(self, rank: int, size: int) -> None: ...

else:
    ProcessGroup = dist.ProcessGroup

C = TypeVar("C", bound=type)
M = TypeVar("M", bound="Callable[..., Any]")

_DEVICES = ("cpu", "cuda")
NAME = "syncprims"  #: of the backend, as in ``init_process_group("syncprims")``

_STANDARD, _PACKAGES = Path(os.__file__).parent, Path(torch.__file__).parent.parent
_FRAMEWORKS = (
    "torch", "accelerate", "transformers", "lightning", "lightning_fabric", "pytorch_lightning",
    "ignite", "torchmetrics", "deepspeed", "trl",
)  # fmt: skip
#: Frames of these stand between the user's line and a collective: torch, the frameworks that are
#: installed beside it, what marks functions of torch as deprecated, our part that torch loads at
#: its import, and what torch compiles to
#: (modules of `torch._inductor`, wherever their files are), whose names differ between ranks.
BETWEEN = (
    *(f"{_PACKAGES / name}{os.sep}" for name in _FRAMEWORKS),
    str(_PACKAGES / "typing_extensions.py"),
    str(_STANDARD / "warnings.py"),
    str(_STANDARD / "_py_warnings.py"),
    _syncprims_c10d.__file__,
    "<eval_with_key>",
    "torch._inductor.",
)

#: Methods of a process group that have several names: torch's C++ code calls the new ones from 2.12
#: on, and the old ones before.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "set_timeout": "_set_default_timeout",
}


def c10d() -> Any:
    """Return the module that holds torch's registry of process groups."""
    return dist.distributed_c10d


def adapt_torch(cls: type[Any]) -> None:
    """Make torch treat groups of the class `cls` as those of its own backends.

    ``destroy_process_group`` calls their ``shutdown``. Newer versions do; that of 2.6 calls
    `_shutdown_backend`, which knows NCCL's groups only. ``init_process_group`` attaches no flight
    recorder to them (2.15): it needs a backend in C++, and raises.
    """
    _call_instead("_shutdown_backend", cls, cls.shutdown)
    _call_instead("_maybe_attach_flight_recorder", cls, lambda group: None)
    _keep_pickling_errors(cls)
    _accept_timeouts()


def _keep_pickling_errors(cls: type[Any]) -> None:
    """Send the other ranks the error of an object that cannot be pickled, by the first collective.

    `_object_to_tensor` would raise before it: the other ranks would meet the next call of this one.
    A send meets the next send of this rank in any case.
    """
    original = NAMES["_object_to_tensor"]

    def convert(obj: object, device: object, group: Any = None) -> Any:
        try:
            return original(obj, device, group)
        except Exception as error:
            served = group or dist.group.WORLD
            if not isinstance(served, cls) or is_called_by("send_object_list"):
                raise
            served.pickling_error = error
            return torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)

    NAMES.set(c10d(), "_object_to_tensor", convert)


def _accept_timeouts() -> None:
    """Make ``Work.wait`` accept a timeout on the handle of a call that is over.

    The class of :func:`finished_work` refuses one, and has no name that could be derived from.
    """
    if getattr(dist.Work.wait, "__module__", None) == __name__:
        return
    original = dist.Work.wait

    def wait(work: Any, *timeout: Any, **named: Any) -> bool:
        if (timeout or named) and work.is_completed():
            timeout, named = (), {}
        finished: bool = original(work, *timeout, **named)
        return finished

    dist.Work.wait = wait


def _call_instead(name: str, cls: type[Any], ours: Callable[[Any], None]) -> None:
    """Call `ours` for groups of `cls`, where torch has a function `name` of a group."""
    original = NAMES[name]
    if original is None:
        return

    def call(group: object, *args: object) -> None:
        if isinstance(group, cls):
            ours(group)
        else:
            original(group, *args)

    NAMES.set(c10d(), name, call)


def with_old_names(cls: C) -> C:
    """Give the methods of a process group the names they have in older versions of torch, too."""
    for name, old in _OLD_NAMES.items():
        setattr(cls, old, cls.__dict__[name])
    return cls


def finished_work(result: object = None) -> Any:
    """Return the handle of a call that is over, with its future.

    It is the only `Work` that torch's C++ code takes over with its result.
    """
    future: Future[Any] = Future()
    future.set_result(result)
    return NAMES["_create_work_from_future"](future)


@functools.cache
def _reductions() -> dict[Any, str]:
    ours = {"avg": "mean", "product": "prod"}
    names: dict[Any, str] = {
        op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()
    }
    # A sum with a factor, NCCL's own, is left out.
    return {op: ours.get(name, name) for op, name in names.items() if name != "premul_sum"}


def reduction_of(given: object) -> str:
    """Return our name of a reduction.

    A `ReduceOp` of an options object is a wrapper around the enumeration, with the `op` in it.

    :raises ValueError: if `given` is not a reduction of all backends of c10d.
    """
    name = _reductions().get(getattr(given, "op", given))
    if name is None:
        raise ValueError(f"the c10d backend {NAME!r} cannot reduce with {given}")
    return name


def is_called_by(function: str) -> bool:
    """Return whether this runs in a function of torch with this name."""
    return any(
        frame.f_code.co_qualname == function and frame.f_globals["__name__"].startswith("torch.")
        for frame, _ in traceback.walk_stack(None)
    )


def needs_dispatcher(args: Sequence[Any]) -> bool:
    """Return whether a mode of torch's dispatcher, or a subclass of tensors, has to see a call."""
    return bool(NAMES["_len_torch_dispatch_stack"]()) or _has_subclass(args)


_PLAIN = cast("Any", torch.Tensor).__torch_dispatch__


def _has_subclass(tensors: Sequence[Any]) -> bool:
    """Return whether the dispatcher calls Python for one of the tensors of a list of lists.

    Every call comes here, so nothing is copied.
    """
    plain = _PLAIN
    for one in tensors:
        kind = type(one)
        if kind is list or kind is tuple:
            if _has_subclass(one):
                return True
        # To look at the attribute takes longer, and nearly all are of these types.
        elif kind not in (torch.Tensor, int) and (
            getattr(kind, "__torch_dispatch__", plain) is not plain
        ):
            return True
    return False


def flattened(tensors: object) -> list[Any]:
    """Return the tensors of a list of lists."""
    if not isinstance(tensors, list | tuple):
        return [tensors]
    return [tensor for part in tensors for tensor in flattened(part)]


_Mode: Any = NAMES["TorchDispatchMode"]


class _PlainCall(_Mode):  # type: ignore[misc]
    """Makes the `call` itself when the dispatcher arrives at tensors that are no subclass."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call
        self.works: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [*itertools.takewhile(lambda one: isinstance(one, torch.Tensor | list), args)]
        fake = any(isinstance(one, NAMES["FakeTensor"]) for one in flattened(tensors))
        if _has_subclass(tensors) and not fake:
            return NotImplemented
        shown = func(*args, **(kwargs or {}))  # to the other modes
        if func.namespace == "c10d" and not fake:
            with without_modes():
                self.works.append(self._call(*tensors))
        return shown


def call_by_dispatcher(
    group: Any, name: str, args: Sequence[Any], named: Any, call: Callable[..., Any]
) -> Any:
    """Show a call to modes and subclasses of tensors, as far as they pass it on to ``call``.

    A process group in Python is called past the dispatcher. So the method `name` is called first of
    a group in C++ that transfers nothing. Its operation has the tensors first: those of the
    program, of a fake, or those that a subclass stands for.
    """
    make = NAMES["FakeProcessGroup._create_internal"] or NAMES["FakeProcessGroup"]
    place = group.rank(), group.size()
    double, kind = dist.ProcessGroup(*place), dist.ProcessGroup.BackendType.CUSTOM
    for device in _DEVICES:
        NAMES["ProcessGroup._register_backend"](double, torch.device(device), kind, make(*place))
    NAMES["ProcessGroup._set_default_backend"](double, kind)
    method = getattr(double, name, None) or getattr(double, _OLD_NAMES[name])
    with _PlainCall(lambda *tensors: call(*tensors, *args[len(tensors) :], **named)) as plain:
        work = method(*args, **named)
    return plain.works[-1] if plain.works else work


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no mode is active."""
    context: contextlib.AbstractContextManager[Any] = NAMES["_disable_current_modes"]()
    return context


@functools.cache
def _kind_of_backends(kind: Any) -> Any:
    def reduce(error: SyncError) -> tuple[Any, ...]:
        return _restore, (kind, str(error), error.facts())

    names = {"__module__": kind.__module__, "__reduce__": reduce}
    return type(kind.__name__, (kind, dist.DistBackendError), names)


def _restore(kind: object, message: str, facts: dict[str, Any]) -> SyncError:
    error: SyncError = _kind_of_backends(kind)(message, **facts)
    return error


def make_backend_error(error: SyncError) -> None:
    """Make `error` a ``DistBackendError`` as well, as which programs catch a lost peer."""
    if not isinstance(error, dist.DistBackendError):
        kind: Any = type(error)
        error.__class__ = _kind_of_backends(kind)


def keep_from_compiler(method: M) -> M:
    """Return `method` as the compiler of torch leaves it alone, and all that it calls.

    Within a region of `torch.compile` that compiler traces any Python function that C++ calls, and
    fails at the attributes of a process group. `torch.compiler.disable` would import the compiler,
    which takes a second. `set_code_exec_strategy` (2.13) marks the code with all that it calls.
    `skip_code` (2.6) marks its own frame only: there, no compiler is set for the frames below it.
    """
    frames = importlib.import_module("torch._C._dynamo.eval_frame")
    if hasattr(frames, "set_code_exec_strategy"):
        skip = NAMES["_FrameAction"].SKIP
        code = cast("Any", method).__code__
        frames.set_code_exec_strategy(code, NAMES["_FrameExecStrategy"](skip, skip))
        return method

    @functools.wraps(method)
    def call(*args: object, **options: object) -> Any:
        compiler = frames.set_eval_frame(None)
        try:
            return method(*args, **options)
        finally:
            frames.set_eval_frame(compiler)

    if hasattr(frames, "skip_code"):  # else only `torch.compile` is affected
        frames.skip_code(cast("Any", call).__code__)
    return cast("M", call)


@contextlib.contextmanager
def recorded(title: str, tensors: Sequence[torch.Tensor]) -> Generator[None]:
    """Record the block for a profiler of torch, with the shapes of `tensors`.

    No public function records shapes. As with torch's own backends, the event ends on another
    thread than it began. There it ends with a future, whose callbacks see the profiler of this
    thread. Without that, torch 2.6 loses the event.
    """
    handle = NAMES["_record_function_with_args_enter"](title, *tensors)
    end: Future[None] = Future()
    NAMES["torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction"](handle, end)
    try:
        yield
    finally:
        thread = threading.Thread(target=end.set_result, args=(None,), name="syncprims-profiler")
        thread.start()
        thread.join()


def default_timeouts() -> list[Any]:
    """Return the timeouts that torch takes where the program names none; they are timedeltas.

    NCCL has one of its own, which is None in builds without it.
    """
    return [NAMES["default_pg_timeout"], NAMES["default_pg_nccl_timeout"]]


def find_backing_store(store: Any) -> Any:
    """Return the store below all prefixes of `store` (`PrefixStore.underlying_store`, 2.0)."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def replaced(*attributes: tuple[Any, str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which attributes, each of an owner and with a name, are replaced."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]

    @contextlib.contextmanager
    def replace() -> Generator[None]:
        for attribute in attributes:
            setattr(*attribute)
        try:
            yield
        finally:
            for attribute in before:
                setattr(*attribute)

    return replace()


class Opening(NamedTuple):
    """A process group that torch is about to make."""

    name: str
    size: int
    rank: int  #: of this process in it
    ranks: list[int]  #: its members; empty: the default group
    backend: str  #: that the program has named
    timeout: timedelta


def serve_every_backend() -> contextlib.AbstractContextManager[None]:
    """Return a context in which every process group of this process, for any backend, is ours.

    ``torch.distributed.get_backend`` returns the name that the program asked for.
    """
    return serve_groups(lambda opening, ours, torchs: ours())


def serve_groups(
    open_group: Callable[[Opening, Callable[[], Any], Callable[[], Any]], Any],
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``open_group(opening, ours, torchs)`` decides whose each group is.

    It returns what one of the last two returns.

    `_new_process_group_helper` makes all groups, and `_world` has their tables, in which the group
    keeps the backend that the program has named.
    """
    module = c10d()
    original = NAMES["_new_process_group_helper"]
    # A build without NCCL has no timeout of NCCL, and would warn a program that asks for NCCL.
    of_any, of_nccl = default_timeouts()

    def make(
        size: Any, rank: Any, ranks: Any, backend: Any, store: Any, name: Any, *args: Any, **kw: Any
    ) -> Any:
        def make_ours() -> Any:
            kw.pop("device_id", None)  # it would connect devices
            asked = "gloo" if str(backend) in ("undefined", "None") else str(backend)
            group, prefixed = original(size, rank, ranks, NAME, store, name, *args, **kw)
            tables = NAMES["_world"]
            if group in tables.pg_map:
                group.served_as = asked
                tables.pg_map[group] = dist.Backend(asked), prefixed
                tables.pg_backend_config[group] = str(module.BackendConfig(asked))
            return group, prefixed

        opening = Opening(str(name), size, rank, [*ranks], str(backend), kw["timeout"])
        torchs = functools.partial(original, size, rank, ranks, backend, store, name, *args, **kw)
        return open_group(opening, make_ours, torchs)

    return replaced(
        (module, "_new_process_group_helper", make),
        (module, "default_pg_nccl_timeout", of_nccl or of_any),
    )


def replaced_rendezvous(
    rendezvous: Callable[[str, int, int], tuple[Any, int, int]],
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `init_process_group` finds its store, rank and size here.

    It calls ``rendezvous(url, rank, world_size)`` of its module, with -1 for what the program does
    not say.
    """

    def meet(url: str, rank: int = -1, world_size: int = -1, **_: object) -> Iterator[Any]:
        yield rendezvous(url, rank, world_size)

    return replaced((c10d(), "rendezvous", meet))


def replaced_init_barrier(
    meet: Callable[[str, Sequence[int] | None], None],
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``meet(call, ranks)`` meets those that make a group; None: all.

    With ``TORCH_DIST_INIT_BARRIER=1``, `_store_based_barrier` does so. It asks the store again and
    again until *real* time has passed. `call` is the call that makes the group.
    """
    of_torch = NAMES["_store_based_barrier"]

    def barrier(rank: int, store: object, name: str, count: int, *more: Any, **named: Any) -> None:
        if find_world() is None:  # the group is left to torch
            of_torch(rank, store, name, count, *more, **named)
            return
        world = NAMES["_world"]
        # None: this rank makes a group in which it is no member.
        group = next((made for made, known in world.pg_names.items() if known == name), None)
        call = "init_process_group" if group is world.default_pg else "new_group"
        whole = count == world.default_pg.size()
        meet(f"{call} {name}", None if whole else sorted(world.pg_group_ranks[group]))

    return replaced((c10d(), "_store_based_barrier", barrier))


def is_rendezvous_replaced() -> bool:
    """Return whether this runs within such a block."""
    return bool(NAMES["rendezvous"].__module__ == __name__)


# -- ranks that are threads ------------------------------------------------------------------------


def _nothing(rank: int) -> None:
    """Return what an attribute is in which a new process keeps nothing."""


_C10D = "torch.distributed.distributed_c10d"
#: What torch keeps for a process in attributes, and what a new process has there: the module, the
#: name in it, and a function of the rank.
PROCESS_ATTRIBUTES: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    (_C10D, "_world", lambda rank: type(NAMES["_world"])()),
    (_C10D, "_group_count", lambda rank: 0),
    (_C10D, "_backend", _nothing),
    (_C10D, "_default_pg_init_method", _nothing),
    ("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module", _nothing),
    ("torch.distributed.tensor._random", "_rng_tracker", _nothing),
    # `loss_parallel` changes it for the time of its block.
    (
        "torch.distributed.tensor.parallel.loss",
        "DTensor._op_dispatcher._custom_op_handlers",
        lambda rank: _handlers_without_loss(),
    ),
)
#: Modules and classes whose tables are those of a process, which are empty in a new one.
PROCESS_TABLES: tuple[tuple[str, str], ...] = (
    (_C10D, ""),
    # The first FSDP notes there what it does at the moment, and refuses to do that twice.
    ("torch.distributed.fsdp._debug_utils", "SimpleProfiler"),
    # Plans that a save keeps for the next one, by the class of the planner.
    ("torch.distributed.checkpoint.planner", "SavePlanner"),
)


def _handlers_without_loss() -> dict[Any, Any]:
    """Return how DTensor computes its special operations outside of `loss_parallel`."""
    from torch.distributed.tensor.parallel import loss

    added = cast("Any", loss).customized_loss_ops
    handlers: dict[Any, Any] = NAMES["DTensor._op_dispatcher._custom_op_handlers"]
    return {op: handler for op, handler in handlers.items() if op not in added}


def forget_group_names() -> None:
    """Forget the names of all groups of this thread; torch keeps them in C++."""
    NAMES["_unregister_all_process_groups"]()


_isolating: list[object] = []  # a world may stand in a rank of another one


@contextlib.contextmanager
def threads_as_processes() -> Generator[None]:
    """Within the block, torch keeps for each thread what it keeps in C++ for a process.

    That is the registry in which functional collectives find their group by its name. A profiler
    raises.
    """
    isolate = NAMES["_set_thread_isolation_mode"]
    profilers: Any = torch.autograd.profiler, torch.profiler
    _isolating.append(isolate)
    isolate(True)
    try:
        with replaced(
            (profilers[0].profile, "__enter__", _refuse_profiler),
            (profilers[1].profile, "prepare_trace", _refuse_profiler),
            (profilers[1].ExecutionTraceObserver, "start", _refuse_profiler),
        ):
            yield
    finally:
        _isolating.pop()
        isolate(bool(_isolating))


class ProfilerRefused(RuntimeError):
    """A profiler of torch cannot work where ranks are threads."""


def _refuse_profiler(profiler: object) -> NoReturn:
    raise ProfilerRefused(
        "torch.profiler, torch.autograd.profiler and ExecutionTraceObserver record a process, and "
        "torch crashes if several of its threads start one: profile in a world of processes, "
        "kind='processes'"
    )
