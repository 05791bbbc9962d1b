"""A schedule that advances once per optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from .optimizer import PreparedOptimizer

if TYPE_CHECKING:
    from .accumulation import Accumulator


class PreparedScheduler(LRScheduler):
    """Stands before a schedule: `step` does nothing where the optimizer did not step.

    That is between windows, and after a step that was skipped for an overflow. It advances by one
    (`advance`), whatever the number of ranks. With `follow` False it advances at every call, and is
    here to be saved with the rest. Everything else is that of :attr:`scheduler`.
    """

    def __init__(
        self, scheduler: Any, accumulator: Accumulator, advance: int = 1, *, follow: bool = True
    ) -> None:
        # Not LRScheduler.__init__: the schedule has begun already.
        self.scheduler = scheduler
        self._accumulator = accumulator
        self._advance = advance
        self._follow = follow
        accumulator.schedules.append(self)
        self._seen = (0, 0)  # steps taken and skipped at the last call
        self._found: PreparedOptimizer | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"Prepared({self.scheduler!r})"

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if its optimizer has stepped."""
        optimizer = self._found = self._found or self._optimizer()
        if optimizer is not None:
            window = optimizer.window()
            if window is not None and not window.sync:
                return
            taken, skipped = self._seen
            self._seen = optimizer.steps_taken, optimizer.steps_skipped
            if optimizer.steps_skipped > skipped and optimizer.steps_taken == taken:
                return
        for _ in range(self._advance):
            self.scheduler.step(*args, **kwargs)

    def _optimizer(self) -> PreparedOptimizer | None:
        """Return the prepared optimizer whose rates this schedule sets, or the only one."""
        if not self._follow:
            return None
        own = getattr(self.scheduler, "optimizer", None)
        if isinstance(own, PreparedOptimizer):
            return own
        prepared = self._accumulator.optimizers
        for optimizer in prepared:
            if optimizer.optimizer is own:
                return optimizer
        return prepared[0] if own is None and len(prepared) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with another schedule's state."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """Return the rates that the last step has set."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the rates of the next step."""
        rates: list[float] = self.scheduler.get_lr()
        return rates
