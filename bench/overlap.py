"""Compare averaging during and after the backward pass, where ranks share the processors.

    syncprims run -n 2 bench/overlap.py

Two methods take turns. The library calls `average_gradients` after the backward pass. The
alternative uses buckets of 4 MB in the reverse order of the parameters. A hook averages each bucket
as soon as it and all earlier buckets are complete. The order is fixed, so all ranks make the same
rounds, even if gradients are computed in another order or not at all. The results are medians of
the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from table import head, row
from torch import nn

from syncprims import all_reduce, barrier, get_rank, get_world_size, print_main
from syncprims.training import average_gradients, broadcast_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TURNS = 25
WARM = 3
BUCKET = 4 << 20


def model_of(width: int = 1024, depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    broadcast_model(model)
    return model


def buckets_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters in buckets, last ones first: their gradients are computed first."""
    made: list[list[nn.Parameter]] = [[]]
    room = BUCKET
    for p in reversed(list(model.parameters())):
        if p.nbytes > room and made[-1]:
            made.append([])
            room = BUCKET
        made[-1].append(p)
        room -= p.nbytes
    return made


class Overlapped:
    """Average each bucket in the hook of its last gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._buckets = buckets_of(model)
        self.begin()
        for number, bucket in enumerate(self._buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
        self.on = False

    def begin(self) -> None:
        """Clear the record of computed gradients."""
        self._left = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            self._left[number] -= 1
            while self.on and self._next < len(self._left) and not self._left[self._next]:
                self._average()

        return arrived

    def _average(self) -> None:
        average_gradients(self._buckets[self._next])
        self._next += 1

    def finish(self) -> None:
        """Average the remaining buckets: those with parameters that got no gradient."""
        while self._next < len(self._buckets):
            self._average()


def measured(ways: dict[str, Callable[[], None]], parameters: Sequence[nn.Parameter]) -> list[str]:
    """Return the median milliseconds of each method on the slowest rank."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + TURNS):
        for name, way in ways.items():
            barrier()
            begin = time.perf_counter()
            way()
            took = all_reduce(time.perf_counter() - begin, "max")
            for p in parameters:
                p.grad = None
            if turn >= WARM:
                seen[name].append(took)
    return [f"{statistics.median(times) * 1e3:.1f}" for times in seen.values()]


def case(model: nn.Module, overlapped: Overlapped, items: int, late: float) -> list[str]:
    batch = torch.randn(items, 1024)
    parameters = list(model.parameters())

    def backward() -> None:
        overlapped.begin()
        if late and get_rank():
            time.sleep(late)  # a late rank, as if it read or computed more
        model(batch).square().mean().backward()

    def afterwards() -> None:
        backward()
        average_gradients(parameters)

    def during() -> None:
        overlapped.on = True
        backward()
        overlapped.finish()
        overlapped.on = False

    return measured({"alone": backward, "after": afterwards, "during": during}, parameters)


def main() -> None:
    torch.set_num_threads(1)
    model = model_of()
    overlapped = Overlapped(model)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    lines = [
        f"{get_world_size()} ranks, {count:.1f} million parameters, milliseconds of a step",
        *head("items", "delay of one rank", "backward alone", "averaged after", "averaged during"),
    ]
    for items, late in ((16, 0.0), (128, 0.0), (128, 0.02)):
        lines.append(row(str(items), f"{late * 1e3:.0f} ms", *case(model, overlapped, items, late)))
    print_main("\n".join(lines))


if __name__ == "__main__":
    main()
