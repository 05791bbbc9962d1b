"""The random number generators that training uses by default: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from syncprims import get_local_world_size
from syncprims._world.runtime import get_world

#: States of the CPU's generators, of Python, numpy and torch, as these return them.
CpuStates = tuple[Any, Any, torch.Tensor]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators with the same number on all ranks.

    With `device_specific` each rank adds its rank. After a `reform` it adds its number among all
    processes that the run has had, so that no other one has drawn the same. With `deterministic`
    torch uses only algorithms that give the same bits each time.
    """
    seed += get_world().backend.process if device_specific else 0
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


#: They keep tuples of numbers apart: seed 1 in epoch 0 is not seed 0 in epoch 1.
_FACTORS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93


def mix(*numbers: int) -> int:
    """Return a seed that is a function of a seed, an epoch, a rank and a position."""
    return sum(a * b for a, b in zip(numbers, _FACTORS, strict=False)) % (1 << 63)


def epoch_generator(seed: int, epoch: int, rank: int = 0) -> torch.Generator:
    """Return a new torch generator that is a function of `seed`, `epoch` and `rank`."""
    return torch.Generator().manual_seed(mix(seed, epoch, rank))


def draw_seed(generator: torch.Generator | None) -> int:
    """Return what torch draws as the seed of a loader's workers."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class WorkerSeed:
    """Seeds the generators of a loader's worker that receives it, and is `index` there.

    By default the numbers are those that torch gives a new worker for this `seed`. With an index
    they are the same in each worker.
    """

    def __init__(self, seed: int, index: object = None) -> None:
        self._seed = seed
        self._index = index

    def __reduce__(self) -> Any:
        return _seed_worker, (self._seed, self._index)


def _seed_worker(seed: int, index: object) -> Any:
    info = get_worker_info()
    if info is not None:
        worker = info.id if index is None else 0
        random.seed(seed + worker)
        torch.default_generator.manual_seed(seed + worker)
        entropy = worker, seed % (1 << 32), seed >> 32, 0  # as torch gives it to this algorithm
        np.random.seed(np.random.SeedSequence(entropy).generate_state(4))
        object.__setattr__(info, "seed", seed + worker)  # which refuses to be set
    return index


def seeded_cpu(generator: torch.Generator) -> CpuStates:
    """Return states of the CPU's generators that follow from the seed of `generator`."""
    seed = generator.initial_seed()
    numbers = np.random.RandomState(seed % (1 << 32)).get_state()
    return random.Random(seed).getstate(), numbers, generator.get_state()


def capture_cpu() -> CpuStates:
    """Return the states of the CPU's generators."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def restore_cpu(states: CpuStates) -> None:
    """Set the CPU's generators to `states`."""
    python, numbers, cpu = states
    random.setstate(python)
    np.random.set_state(numbers)
    torch.set_rng_state(cpu)


def capture() -> dict[str, Any]:
    """Return the states of all generators, this rank's GPUs included."""
    gpus = {str(device): torch.cuda.get_rng_state(device) for device in _own_gpus()}
    return {"cpu": capture_cpu(), "cuda": gpus}


def check(state: dict[str, Any]) -> None:
    """Raise unless :func:`restore` can set all generators to this state.

    :raises ValueError: if the state holds a GPU that this rank does not use, or lacks one.
    :raises Exception: of any kind, if :func:`capture` has not made it.
    """
    devices = {str(device) for device in _own_gpus()}
    if devices != state["cuda"].keys():
        what = f"it has the states of GPUs {sorted(state['cuda'])}, and here are {sorted(devices)}"
        raise ValueError(f"{what}; with rng=False all generators stay as they are")
    python, numbers, cpu = state["cpu"]
    random.Random().setstate(python)
    numpy: Any = np.random
    own = type(numpy.get_bit_generator())  # which a program may have set
    np.random.RandomState(own()).set_state(numbers)
    torch.Generator().set_state(cpu)
    for device, own in state["cuda"].items():
        torch.Generator(f"cuda:{device}").set_state(own)


def restore(state: dict[str, Any]) -> None:
    """Set all generators to what :func:`capture` has returned.

    :raises Exception: as :func:`check`, before any of them is set.
    """
    check(state)
    restore_cpu(state["cpu"])
    for device, own in state["cuda"].items():
        torch.cuda.set_rng_state(own, int(device))


def _own_gpus() -> list[int]:
    """Return the GPUs whose random numbers this rank uses: all if it is alone on its node."""
    if not torch.cuda.is_available():
        return []
    alone = get_local_world_size() == 1
    return list(range(torch.cuda.device_count())) if alone else [torch.cuda.current_device()]
