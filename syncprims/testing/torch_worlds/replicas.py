"""Replicas of a world of a test, compared between its ranks.

There is no round for it: a rank leaves its digests in a file, and the last one compares. So the
numbers of rounds stay those of the program, and no rank waits.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from syncprims._data.digests import Digests, digest_tensors
from syncprims._world.runtime import current
from syncprims.c10d import torch_internals
from syncprims.c10d.torch_internals import dist
from syncprims.training import replicas

Shared = Callable[[], contextlib.AbstractContextManager[dict[Any, Any]]]


class ReplicaComparison:
    """Compares what each optimizer steps.

    That is its models, and the tensors that it keeps for them. A model is found by its forward
    pass. Its buffers are compared before the first pass after the step: until then, the
    program may make them equal.
    """

    def __init__(self, shared: Shared) -> None:
        """Use the dictionary that all ranks share."""
        self._shared = shared
        self._seen = weakref.WeakSet[nn.Module]()  # that have had a forward pass
        self._uses = weakref.WeakKeyDictionary[Optimizer, tuple[int, int]]()
        self._counts = Counter[int]()  # of the optimizers of each rank
        self._due = weakref.WeakKeyDictionary[nn.Module, tuple[str, object]]()  # at the next pass

    @contextlib.contextmanager
    def at_each_step(self) -> Generator[None]:
        """Return a context in which each step is compared."""
        hooks = [
            register_optimizer_step_post_hook(self._after_step),
            register_module_forward_pre_hook(self._before_forward),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_forward(self, model: nn.Module, _: object) -> None:
        self._seen.add(model)
        place = self._due.pop(model, None)
        if place is not None:
            with torch_internals.without_modes():
                self._compare(model, place, replicas.digest_buffers(model))

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if _is_inside_another():
            return
        number, step = self._count(optimizer)
        when = f"after step {step}" + (f" of optimizer {number}" if number else "")
        all_stepped = (p for group in optimizer.param_groups for p in group["params"])
        stepped = {
            p: f"parameter {number} of the optimizer" for number, p in enumerate(all_stepped)
        }
        with torch_internals.without_modes():
            for index, model in enumerate(self._find_models(stepped)):
                found = replicas.digest_model(model)
                found |= replicas.digest_optimizer(optimizer, [model])
                self._compare(model, (when, index), found)
                self._due[model] = f"before the forward pass {when}", index
                for p in model.parameters():
                    stepped.pop(p, None)
            rest = digest_tensors((name, p) for p, name in stepped.items())
            self._compare(None, (when, "rest"), rest)

    def _count(self, optimizer: Optimizer) -> tuple[int, int]:
        """Return its number among those of this rank, and how often it has stepped."""
        number, count = self._uses.get(optimizer, (self._counts[current().rank], 0))
        if not count:
            self._counts[current().rank] += 1
        self._uses[optimizer] = number, count + 1
        return self._uses[optimizer]

    def _find_models(self, stepped: Iterable[nn.Parameter]) -> list[nn.Module]:
        """Return the outermost models that have some of these, in their order."""
        places = {p: place for place, p in enumerate(stepped)}
        found = {
            model: min(own)
            for model in self._seen
            if (own := [places[p] for p in model.parameters() if p in places])
        }
        inner = {part for model in found for part in model.modules() if part is not model}
        return sorted(set(found) - inner, key=found.__getitem__)

    def _compare(
        self, model: nn.Module | None, place: tuple[str, object], digests: Digests
    ) -> None:
        """Leave the digests of this rank; if it is the last one, compare those of all.

        :raises RankMismatch: if they differ.
        """
        world = current()
        ranks = [*range(world.world_size)]
        if isinstance(model, DDP):
            ranks = dist.get_process_group_ranks(model.process_group)
        key = "replicas", *ranks, *place
        with self._shared() as values:
            found: dict[int, Digests] = values.setdefault(key, {})
            found[world.rank] = digests
            if len(found) < len(ranks):
                return
            del values[key]
        error = replicas.difference(dict(sorted(found.items())), place[0])
        if error is not None:
            raise error


def _is_inside_another() -> bool:
    """Return whether the step is part of that of an optimizer for several ranks.

    Such a one, as ZeRO, steps different parameters on each rank, then makes all equal.
    """
    return any(
        str(frame.f_globals.get("__name__")).startswith("torch.distributed.optim")
        for frame, _ in traceback.walk_stack(None)
    )
