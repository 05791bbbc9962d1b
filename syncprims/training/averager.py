"""Which gradients are averaged over the ranks when: after a pass, or at the end of a window."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncprims import all_gather, any_rank, get_world_size

from .gradient_sync import (
    average_all,
    averagers,
    averages_gradients_itself,
    broadcast_buffers,
    gradient_sync,
)
from .private_names import NAMES
from .pytree import is_dtensor


class Averager:
    """Averages the gradients of one accumulator's models over the ranks.

    Hooks tell it which models a backward pass of this rank has reached. It runs after each pass,
    whoever starts it. What a pass has left in a model is averaged at once, or, for the models of a
    window, when that closes.
    """

    def __init__(
        self, waiting: Callable[[], list[nn.Module]], half_full: Callable[[], list[nn.Module]]
    ) -> None:
        """Begin without models; the functions return those of windows in use, and not full."""
        self._waiting, self._half_full = waiting, half_full
        #: Of :func:`join_uneven_inputs`: announces an event of this rank to the others, and returns
        #: what the ranks that still train have announced.
        self.announce: Callable[[str, Any], list[Any]] | None = None
        self.first_active: int = 0  #: the lowest rank that still trains
        self.unsynced: list[nn.Module] = []  #: models in a block of `no_sync`
        self.models: list[nn.Module] = []  #: prepared or named ones, in the same order on all ranks
        self.parameters: set[torch.Tensor] = set()  #: of these, when they came
        self.has_narrow: bool = False  #: some are in fp16, whose sums overflow
        self._behind: set[nn.Module] = set()  # they hold gradients of this rank alone
        self._handles: list[Any] = []
        self._hooked: set[nn.Module] = set()
        self._paused = False  # the library runs the pass
        self._running_pass: Callable[[], int] = NAMES["_current_graph_task_id"]
        self._pass = -1  # the number that torch has given to the current pass
        self._reached: set[nn.Module] = set()  # by the latest pass
        #: models in FSDP, and their parameters, whose place others take during a pass
        self.sharded: dict[nn.Module, list[nn.Parameter]] = {}
        self._known: dict[nn.Module, set[torch.Tensor]] = {}  # parameters that DDP was made with
        self._forward: set[nn.Module] = set()  # DDP expects a backward pass of these
        self._averaged: dict[nn.Parameter, torch.Tensor | None] = {}  # while ranks join

    # -- models and their passes ------------------------------------------------------------------

    def watch(self, model: nn.Module) -> None:
        """Note what backward passes leave in `model`, also in parameters that are frozen now."""
        if model in self.models:
            return
        self.models.append(model)
        parameters = list(model.parameters())
        self.parameters.update(parameters)
        self.has_narrow |= any(p.dtype == torch.float16 for p in parameters)
        if isinstance(model, DistributedDataParallel):
            self._known[model] = {p for p in parameters if p.requires_grad}
            self._handles.append(model.register_forward_hook(self._note_forward))
        elif averages_gradients_itself(model):
            self.sharded[model] = parameters
        # A hook makes FSDP wait for what it copies to the CPU.
        if get_world_size() > 1 and model not in self.sharded:
            self._hook(model)

    def expect(self, own: Sequence[nn.Module]) -> None:
        """Prepare for passes of a window of the models `own`: note which others they reach."""
        if len(self.models) > len(own):
            for model in self.models:
                if model not in own:
                    self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        """Note the passes that reach `model`."""
        if model in self._hooked:
            return

        def note(_: torch.Tensor) -> None:
            if not self._paused:
                self._begin_plain()
            self._reached.add(model)

        self._hooked.add(model)
        for p in model.parameters():
            if p.is_floating_point() or p.is_complex():
                needed = p.requires_grad
                p.requires_grad_(True)  # torch takes hooks for such parameters only
                self._handles.append(p.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
                p.requires_grad_(needed)

    def clear(self) -> None:
        """Forget all models."""
        for handle in self._handles:
            handle.remove()
        for held in vars(self).values():
            if isinstance(held, set | dict | list):
                held.clear()
        self.has_narrow = False

    @contextlib.contextmanager
    def with_sync(self, model: nn.Module, *, enabled: bool) -> Generator[None]:
        """In this block, average the gradients of `model` after a backward pass, or do not."""
        before = self.unsynced
        others = [other for other in before if other is not model]
        self.unsynced = others if enabled else [*others, model]
        try:
            with gradient_sync(model, enabled):
                yield
        finally:
            self.unsynced = before

    @contextlib.contextmanager
    def reducing_shards(self) -> Generator[None]:
        """In this block FSDP reduces also in `no_sync`: nothing scales what it has not reduced."""
        with contextlib.ExitStack() as stack:
            for model in self.unsynced:
                if model in self.sharded:
                    stack.enter_context(self.with_sync(model, enabled=True))
            yield

    def begin_pass(self) -> None:
        """Begin a pass that the library runs."""
        self._paused, self._reached = True, set()

    def end_pass(self) -> None:
        """End it, also if it has failed."""
        self._paused = False
        self._mark()

    def _begin_plain(self) -> None:
        # A failed pass never ended: the number of the pass shows that, and an empty set would not.
        number = self._running_pass()
        if number != self._pass:
            self._pass, self._reached = number, set()
            queue_callback = NAMES["Variable._execution_engine"].queue_callback
            queue_callback(lambda: queue_callback(self._end_plain))

    def _end_plain(self) -> None:
        """Average after a script's own pass, once DDP has written its means."""
        self._pass = -1
        self._mark()
        self.average_outside(plain=True)

    def _mark(self) -> None:
        """Note which models hold gradients that were not averaged."""
        if get_world_size() == 1:
            return
        for model in self._reached:
            alone = model in self.sharded or (
                model in self._known and model.require_backward_grad_sync
            )
            if alone and model not in self.unsynced:
                self._behind.discard(model)
            else:
                self._behind.add(model)
        if self._behind:
            averagers().add(self)

    def note_average(self, parameters: Collection[torch.Tensor]) -> None:
        """Note that these were averaged, by whomever."""
        if self._behind:
            averaged = set(parameters)
            held = {m: [p for p in m.parameters() if p.grad is not None] for m in self._behind}
            self._behind = {model for model, own in held.items() if not averaged.issuperset(own)}

    def check_averaged(self, parameters: Iterable[torch.Tensor], call: str) -> None:
        """Check that `call` reads only gradients that were averaged.

        :raises RuntimeError: otherwise.
        """
        if get_world_size() == 1:
            return
        what = f"{call} would use gradients of this rank alone"
        if self._running_pass() >= 0 and not all(map(is_dtensor, parameters)):
            why = "a backward pass is running, and gradients are averaged at its end"
            raise RuntimeError(f"{what}: {why}. Call it after backward(), or use fully_shard()")
        behind = [model for model in self._behind if model not in self.unsynced]
        if behind:
            wanted = {p for p in parameters if p.grad is not None}
            for model in behind:
                if not wanted.isdisjoint(model.parameters()):
                    why = f"those of {type(model).__name__} have not been averaged yet"
                    cure = "Close its window by flush(), or call average_gradients()"
                    own = "If they are averaged, or are to differ, step inside of no_sync(model)"
                    raise RuntimeError(f"{what}: {why}. {cure}. {own}")

    # -- averages ---------------------------------------------------------------------------------

    def average(
        self, own: Sequence[nn.Module] = (), *, now: bool = False, plain: bool = False
    ) -> list[nn.Module]:
        """Average what a pass has left; return the other models that it reached. Collective.

        Gradients of `own`, the models of a window, are averaged if it closes `now`. Those of others
        are, except in a block of `no_sync`, and, of a script's `plain` pass, in an open window.
        """
        kept = [*own, *(self._waiting() if plain else ()), *self.unsynced]
        others = [model for model in self.models if model not in kept]
        if get_world_size() == 1 or not (others or now):
            return [m for m in self.models if m in self._reached and m not in own]
        if plain and len(others) == 1 and others[0] not in self._known:
            due = others  # passes of all ranks have reached it
        else:
            due = self._choose(own if now else (), others)
        held_back = {p for model in self.unsynced for p in model.parameters()}
        average_all(dict.fromkeys(p for m in due for p in m.parameters() if p not in held_back))
        self._behind -= {model for model in due if model not in self.unsynced}
        return [m for m in self.models if m not in own and (m in due or m in self._reached)]

    def average_outside(self, *, plain: bool = False) -> None:
        """Average gradients that a pass outside of windows has left. Collective.

        Those of an open window wait if the pass was a script's own, a `plain` one. Buffers are
        main's afterwards, except where ranks without batches join.
        """
        waiting = self._waiting() if plain else []
        if self.announce is None:
            reached = self.average(plain=plain)
            buffered = reached if plain else self.models
            for model in buffered if get_world_size() > 1 else ():
                if model not in (*waiting, *self.unsynced) and any(True for _ in model.buffers()):
                    broadcast_buffers(model)
        elif free := [m for m in self.models if m not in waiting and m not in self.unsynced]:
            reached = [model for model in free if model in self._reached]
            places = [self.models.index(model) for model in reached]
            every = (p for model in free for p in model.parameters())
            uncleared = any(p.grad is not None and p.grad is self._averaged.get(p) for p in every)
            self.average_announced(self.announce("gradients", (places, uncleared)))

    def average_announced(
        self, values: Sequence[tuple[list[int], bool]], *, joins: bool = False
    ) -> None:
        """Average what the ranks that train have announced to have reached. Collective.

        A rank that `joins` adds zeros. If the others have not cleared what the last pass left, it
        stays here, too: it is the same.
        """
        places = sorted({place for reached, _ in values for place in reached})
        own = dict.fromkeys(p for place in places for p in self.models[place].parameters())
        if joins and not any(uncleared for _, uncleared in values):
            for p in own:
                p.grad = None
        average_all(own)
        self._behind -= {self.models[place] for place in places}
        self._averaged.update((p, p.grad) for p in own)

    def _choose(self, own: Sequence[nn.Module], others: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the models with gradients to average on some rank. Collective.

        They are all of `own`, and the others that a pass of any rank has reached, or that were not
        averaged before. Of a model in DDP, some that DDP has missed; while ranks join, it averages
        nothing.
        """
        wrapped = [m for m in (*own, *others) if m in self._known and self.announce is None]
        due = [m for m in own if m not in wrapped]
        due += [m for m in others if m in self.sharded and m in self._reached]  # on all ranks
        asked = wrapped + [m for m in others if m not in wrapped and m not in self.sharded]
        mine = [self._misses(m) if m in wrapped else self._has_left(m) for m in asked]
        if len(mine) < 2:
            found = [any_rank(bit, name="gradients to average") for bit in mine]
        else:
            rows = all_gather(mine, name="gradients to average")
            found = [any(bits) for bits in zip(*rows, strict=True)]
        return due + [m for m, there in zip(asked, found, strict=True) if there]

    def _has_left(self, model: nn.Module) -> bool:
        """Return whether passes have left something in `model`, also in parameters it got later."""
        if model in self._reached:
            return True
        if model in self._half_full():
            return False
        every = model.parameters()
        return model in self._behind or any(
            p.grad is not None and p not in self.parameters for p in every
        )

    def _misses(self, model: nn.Module) -> bool:
        """Return whether `model` has gradients that its DDP has not averaged in the last pass.

        So it is with parameters that DDP was not made with, since they were frozen or not there
        yet, and if DDP has not seen the forward pass.
        """
        known = self._known[model] if model in self._forward else set[torch.Tensor]()
        self._forward.discard(model)
        return not known.issuperset(p for p in model.parameters() if p.grad is not None)

    def _note_forward(self, model: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._forward.add(model)

    def end_join(self) -> None:
        """Return to ranks with equally many micro-batches."""
        self.announce, self.first_active = None, 0
        self._averaged.clear()
