"""One measured rank of Accelerate on Gloo."""

from __future__ import annotations

import timing
import torch
import torch.distributed as dist
from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True)
    rank, ranks = int(accelerator.process_index), int(accelerator.num_processes)

    def gather(figure: float) -> list[float]:
        mine = torch.tensor([figure], dtype=torch.float64)
        return [float(each) for each in accelerator.gather(mine)]

    arrays = {name: torch.from_numpy(array) for name, array in timing.ARRAYS.items()}

    own = torch.from_numpy(timing.GATHERED)

    timing.run(
        timing.Library(
            rank=rank,
            ranks=ranks,
            barrier=accelerator.wait_for_everyone,
            gather=gather,
            calls={
                "barrier": accelerator.wait_for_everyone,
                "flag": accelerator.check_trigger,
                "small arrays": lambda: accelerator.reduce(arrays),
                "gathered arrays": lambda: accelerator.gather(own),
            },
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
