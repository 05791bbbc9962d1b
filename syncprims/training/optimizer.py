"""Prepared optimizers and schedules: they advance when a window is closed.

After a step, optimizers and models can be compared between ranks.
"""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncprims import all_gather, get_world_size
from syncprims._data.digests import Digests

from . import replicas
from .accumulation import AccumulationWindow, Accumulator, averager_of, parameters_of
from .private_names import NAMES


def delegated(path: str, meaning: str = "", *, settable: bool = False) -> Any:
    """Return a property that is an attribute of another object, such as ``optimizer.state``."""
    owner, _, name = path.rpartition(".")
    find_owner = operator.attrgetter(owner)

    def write(instance: object, value: object) -> None:
        setattr(find_owner(instance), name, value)

    return property(operator.attrgetter(path), write if settable else None, doc=meaning)


class PreparedOptimizer(Optimizer):
    """Wraps an optimizer: `step` and `zero_grad` do nothing between windows.

    Everything else (`state`, `param_groups`, hooks, state dicts) is that of :attr:`optimizer`.
    """

    def __init__(self, optimizer: Optimizer, accumulator: Accumulator) -> None:
        # Not Optimizer.__init__: the wrapped optimizer holds everything already.
        self.optimizer = optimizer
        self._recorder: Any = _StepRecorder(optimizer)
        # An optimizer's own zero_grad() is always called.
        self._plain = getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad
        self.steps_taken: int = 0
        self.steps_skipped: int = 0
        self.step_was_skipped: bool = False  #: the last step met an overflow, on some rank
        self._follow(accumulator)

    def _follow(self, accumulator: Accumulator) -> None:
        """Step and clear when windows of `accumulator` are closed, and forget all earlier ones."""
        self._accumulator, self._precision = accumulator, accumulator.precision
        self._windows: list[AccumulationWindow] = []
        self._known = -1, -1, -1  # numbers of windows, groups and adoptions at the last search
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        """Forget what is known of the gradients: others have taken their place."""
        self._used = False  # a step has used the gradients
        self._stepped: object = None  # the period of the window of the last step
        self._ready = False  # the gradients are unscaled

    # -- the optimizer's own ------------------------------------------------------------------

    state: defaultdict[torch.Tensor, Any] = delegated("optimizer.state", settable=True)
    param_groups: list[dict[str, Any]] = delegated("optimizer.param_groups", settable=True)
    defaults: dict[str, Any] = delegated("optimizer.defaults", settable=True)

    def __getattr__(self, name: str) -> Any:
        if name in ("train", "eval"):  # the modes of schedule-free ones: others have none
            return getattr(self.optimizer, name, lambda: None)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared{self.optimizer!r}"

    def __reduce__(self) -> Any:
        return _copy_of_no_job, (self.optimizer,)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    # -- steps of closed windows ----------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the window of these parameters is closed, so that the next step passes."""
        window = self._window()
        return window is None or window.sync

    def _window(self) -> AccumulationWindow | None:
        """Return the window of these parameters; of several, the last entered one.

        If there is none, it is the one that the code is in, or has left without a step.
        """
        entered, groups = self._accumulator.entered, len(self.optimizer.param_groups)
        known = len(entered), groups, self._accumulator.adoptions
        if self._known != known:  # searched once: a step asks several times
            self._known = known
            ids = {id(p) for p in parameters_of(self.optimizer)}
            self._windows = [window for window in entered if window.owns(ids)]
        if len(self._windows) > 1:
            return next(window for window in reversed(entered) if window in self._windows)
        if self._windows:
            return self._windows[0]
        inside = next((window for window in reversed(entered) if window.inside), None)
        return inside or (entered[-1] if entered and not entered[-1].stepped else None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the window is closed; otherwise keep the gradients for the next step.

        Under fp16 a step whose gradients overflowed on any rank is skipped on all.

        :raises RuntimeError: if some gradients were not averaged over the ranks, as inside of a
            backward pass; torch's, if DDP still waits for those of some parameters.
        """
        window = self._window()
        if window is not None and not window.sync:
            return None
        for model in self._accumulator.models if window is None else window.models:
            if isinstance(model, DistributedDataParallel):
                NAMES.of(model, "DistributedDataParallel._check_reducer_finalized")()
        averager = averager_of(self._accumulator)
        averager.check_averaged(parameters_of(self.optimizer), "step()")
        scaled = self._precision.scaler is not None
        self.unscale_gradients()
        result = None
        self.step_was_skipped = False
        if not scaled:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        elif closure is not None:
            raise ValueError("under fp16 a step takes no closure: its loss would not be scaled")
        elif any(p.grad is not None for p in parameters_of(self.optimizer)):
            self._recorder.called = False
            self._precision.step(self._recorder)
            self.step_was_skipped = not self._recorder.called
        self._ready, self._used = False, True
        if window is not None:
            window.stepped, self._stepped = True, window.period
        self.steps_skipped += self.step_was_skipped
        self.steps_taken += not self.step_was_skipped
        if self._accumulator.check_replicas:
            self._check_replicas(window)
        return result

    def _check_replicas(self, window: AccumulationWindow | None) -> None:
        """Compare the replicas, if this is the step for it. Collective.

        Not where ranks without batches join: they make no steps. In its block, a window has yet to
        make buffers equal.
        """
        accumulator, step = self._accumulator, self.steps_taken + self.steps_skipped
        joining = averager_of(accumulator).announce is not None
        if step % (accumulator.check_replicas or 1) == 0 and not joining:
            inside = window is not None and window.inside
            _compare_replicas(accumulator.models, self.optimizer, step, buffers=not inside)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that a step has used; those that wait for a step stay."""
        window = self._window()
        if window is not None and not self._used and window.waits_for(self._stepped):
            return
        if set_to_none and self._plain and not NAMES["_profiler_enabled"]():
            # As torch does, without its profiler's mark, which takes longer than all the rest.
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self._used = self._ready = False

    def unscale_gradients(self) -> None:
        """Leave in ``.grad`` what the step will use, without the loss scale. Acts once per step."""
        scaler = self._precision.scaler
        if scaler is None or self._ready:
            return
        self._ready = True
        there = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
        if there:
            if self._precision.has_stepped(self._recorder):  # in this window: its factor is used
                before = scaler.get_scale()
                self._precision.update_scaler()
                if (after := scaler.get_scale()) != before:
                    torch._foreach_mul_(there, after / before)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            scaler.unscale_(self._recorder)


def _compare_replicas(
    models: Sequence[nn.Module], optimizer: Optimizer, step: int, *, buffers: bool
) -> None:
    """Check that models and the tensors of their optimizer are the same on all ranks. Collective.

    :raises RankMismatch: on all ranks, if they are not.
    """
    ranks = get_world_size()
    if ranks == 1:
        return
    chosen = [
        model
        for model in models
        if not isinstance(model, DistributedDataParallel)
        or distributed.get_world_size(model.process_group) == ranks
    ]
    mine: Digests = {}
    for number, model in enumerate(chosen):
        where = f" of model {number}" if len(chosen) > 1 else ""
        found = replicas.digest_model(model) | (replicas.digest_buffers(model) if buffers else {})
        mine.update((name + where, digest) for name, digest in found.items())
    mine.update(replicas.digest_optimizer(optimizer, chosen))
    # The others are sent only if this differs.
    whole = hashlib.sha256(repr(sorted(mine.items())).encode()).digest()
    if len(set(all_gather(whole, name="replicas"))) > 1:
        of_all = dict(enumerate(all_gather(mine, name="replicas")))
        error = replicas.difference(of_all, f"after step {step}")
        if error is not None:
            raise error


def _copy_of_no_job(optimizer: Optimizer) -> PreparedOptimizer:
    """Return a copied or pickled optimizer: every step passes."""
    return PreparedOptimizer(optimizer, Accumulator())


class _StepRecorder:
    """The optimizer that a scaler steps: it records the call.

    It hides from the scaler whether the kernels are fused: those could skip a step unseen.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.called = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self) -> Any:
        self.called = True
        return self._optimizer.step()


class PreparedScheduler:
    """Wraps a schedule: `step` does nothing if its optimizer did not step.

    That is so between windows, and after a step that was skipped for an overflow. It advances by
    `advance`, whatever the number of ranks, and by one in a call with an argument, such as the
    metric of ``ReduceLROnPlateau``. With `follow` False it advances at every call, and is
    wrapped only to be saved with the rest. With `to_end` it stays at the end of a schedule that has
    one, as `OneCycleLR`. Everything else is that of :attr:`scheduler`.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        advance: int = 1,
        *,
        follow: bool = True,
        to_end: bool = False,
    ) -> None:
        self.scheduler = scheduler  # of torch, or an object with the same methods
        self._optimizers = optimizers
        self._advance = advance
        self._follow = follow
        self._to_end = to_end
        self._seen = (0, 0)  # steps taken and skipped at the last call
        self._found: PreparedOptimizer | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: object) -> None:
        own = self.__dict__
        if name not in own and name in getattr(own.get("scheduler"), "__dict__", ()):
            setattr(self.scheduler, name, value)  # such as `base_lrs`
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Prepared({self.scheduler!r})"

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if its optimizer has stepped."""
        optimizer = self._found = self._found or self._find_optimizer()
        if optimizer is not None:
            if not optimizer.sync_gradients:
                return
            taken, skipped = self._seen
            self._seen = optimizer.steps_taken, optimizer.steps_skipped
            if optimizer.steps_skipped > skipped and optimizer.steps_taken == taken:
                return
        # An argument is a metric, which counts once, or the new position.
        for _ in range(1 if args or kwargs else self._advance):
            total = getattr(self.scheduler, "total_steps", None) if self._to_end else None
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def _find_optimizer(self) -> PreparedOptimizer | None:
        """Return the prepared optimizer whose rates this schedule sets, or the only one."""
        if not self._follow:
            return None
        own = getattr(self.scheduler, "optimizer", None)
        if isinstance(own, PreparedOptimizer):
            return own
        for optimizer in self._optimizers:
            if optimizer.optimizer is own:
                return optimizer
        return self._optimizers[0] if own is None and len(self._optimizers) == 1 else None
