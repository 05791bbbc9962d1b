"""Train through preemptions and failures, and end with the weights of an undisturbed run.

Send SIGTERM to any rank, as a scheduler does before it preempts the job: all ranks save the same
step and leave. When the script is started again, it continues exactly from there.

    syncprims run -n 2 examples/preempt.py --directory run

Here the last rank fails at step 17. All ranks are ended, and started again as the next generation
(``SYNCPRIMS_RESTART``). They load the newest checkpoint:

    syncprims run -n 2 --max-restarts 3 examples/preempt.py --save-every 10 --fail-at 17
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from syncprims import Trigger, all_reduce, barrier, get_rank, is_last, is_main, print_main
from syncprims.training import Checkpoints


class Steps:
    """The progress of the training."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from this state."""
        self.done = state["done"]


def train(directory: str, steps: int, save_every: int, fail_at: int | None) -> float:
    torch.manual_seed(0)  # the same weights on all ranks
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    progress = Steps()
    everything: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": progress}
    generation = int(os.environ.get("SYNCPRIMS_RESTART", "0"))

    checkpoints = Checkpoints(directory, keep_last=2)
    torch.manual_seed(1 + get_rank())  # different data on each rank; load() restores its position
    if checkpoints.latest() is not None:
        checkpoints.load(everything)
        print_main(f"generation {generation} continues after step {progress.done}")
    stop = Trigger("stop")
    stop.set_on_signal()  # SIGTERM

    while progress.done < steps:
        data = torch.randn(16, 8)
        loss = (model(data) - data.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = all_reduce(parameter.grad, "mean")
        optimizer.step()
        progress.done += 1
        if stop.check():  # the same answer on all ranks, at the same step
            checkpoints.save(progress.done, everything)
            print_main(f"saved step {progress.done}: {stop.reason} on ranks {stop.ranks}")
            barrier("stopped", device=True)  # no rank exits while a device computes
            return float("nan")
        if generation == 0 and progress.done == fail_at and is_last():
            raise RuntimeError(f"a failure in step {fail_at}")
        if progress.done % save_every == 0:
            checkpoints.save(progress.done, everything)
    checkpoints.save(progress.done, everything)
    if is_main():
        Path(directory, "finished").touch()  # a job that is started again has nothing left to do
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--fail-at", type=int, help="the last rank fails in this step, once")
    options = parser.parse_args()
    result = train(options.directory, options.steps, options.save_every, options.fail_at)
    print_main(f"the weights add up to {result!r}")


if __name__ == "__main__":
    main()
