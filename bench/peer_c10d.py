"""One measured rank of torch.distributed: the same program on Gloo and on our backend.

The last argument is the plan, and the one before it the name of the backend.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import timing
import torch
import torch.distributed as dist
from catalogue import KB, MB
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

ALL_REDUCES = (4, KB, 64 * KB, MB)  # bytes
TRANSFERS = (64 * KB,)
#: Name of a model -> its hidden layers and their width.
MODELS = {"2.1 M": (2, 1024), "25 M": (6, 2048)}


def transfer(rank: int, size: int) -> Callable[[], None]:
    """Return a call that sends `size` bytes from rank 0 to rank 1 and back; others do nothing."""
    tensor = torch.zeros(size // 4)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    return there_and_back


def training_step(layers: int, width: int) -> Callable[[], None]:
    """Return a call that trains a model in DDP for one step."""
    torch.manual_seed(0)
    hidden = [nn.Linear(width, width) for _ in range(layers)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    dist.init_process_group(sys.argv[-2])
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def gather(figure: float) -> list[float]:
        figures = torch.zeros(ranks, dtype=torch.float64)
        figures[rank] = figure
        dist.all_reduce(figures)
        return [float(each) for each in figures]

    def objects() -> None:
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, timing.SMALL_DICT)

    calls: dict[str, Callable[[], object]] = {"barrier": dist.barrier, "objects": objects}
    for size in ALL_REDUCES:
        calls[f"all_reduce {size}"] = functools.partial(dist.all_reduce, torch.zeros(size // 4))
    for size in TRANSFERS:
        calls[f"transfer {size}"] = transfer(rank, size)
    for name, model in MODELS.items():
        calls[f"DDP {name}"] = training_step(*model)
    timing.run(
        timing.Library(rank=rank, ranks=ranks, barrier=dist.barrier, gather=gather, calls=calls)
    )
    dist.barrier()  # Gloo's threads of a rank that ends early disturb the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
