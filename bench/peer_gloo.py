"""One measured rank of torch.distributed with Gloo."""

from __future__ import annotations

import timing
import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flag = torch.zeros(1, dtype=torch.int32)

    def gather(figure: float) -> list[float]:
        figures = torch.zeros(ranks, dtype=torch.float64)
        figures[rank] = figure
        dist.all_reduce(figures)
        return [float(each) for each in figures]

    def all_gather() -> None:
        everyones: list[int | None] = [None] * ranks
        dist.all_gather_object(everyones, rank)

    def number() -> float:
        value = torch.tensor(1.0, dtype=torch.float64)
        dist.all_reduce(value)
        return value.item()

    def small_dict() -> None:
        dist.broadcast_object_list([timing.SMALL_DICT if rank == 0 else None])

    arrays = [torch.from_numpy(array) for array in timing.ARRAYS.values()]

    def small_arrays() -> None:
        for array in arrays:
            dist.all_reduce(array)

    own = torch.from_numpy(timing.GATHERED)
    gathered = [torch.empty_like(own) for _ in range(ranks)]

    timing.run(
        timing.Library(
            rank=rank,
            ranks=ranks,
            barrier=dist.barrier,
            gather=gather,
            calls={
                "barrier": dist.barrier,
                "flag": lambda: dist.all_reduce(flag, dist.ReduceOp.MAX),
                "all_gather": all_gather,
                "small dict": small_dict,
                "number": number,
                "small arrays": small_arrays,
                "gathered arrays": lambda: dist.all_gather(gathered, own),
            },
            broadcast=lambda array: dist.broadcast(torch.from_numpy(array), 0),
            all_reduce=lambda value, out: dist.all_reduce(torch.from_numpy(out)),
            in_place=True,
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
