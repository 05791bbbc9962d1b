"""Order and groups."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .bug import RANKS, bug, ones


@bug("NVIDIA/nvalchemi-toolkit#143", 1, "reverse=rank == 1", "reverse=False")
def order_of_a_set(rank: int, folder: Path) -> None:
    """Outputs were reduced in the order of a set."""
    for name in sorted({"energy", "forces"}, reverse=rank == 1):  # as a set may be ordered there
        if name == "energy":
            dist.all_reduce(ones(1))  # bug
        else:
            dist.all_gather_object([None] * RANKS, name)  # bug


@bug("run-ai/runai-model-streamer#165", 1, "rank == 1", "False")
def groups_in_another_order(rank: int, folder: Path) -> None:
    """Ranks used two groups in different orders."""
    groups = [dist.new_group(), dist.new_group()]
    for group in reversed(groups) if rank == 1 else groups:
        dist.broadcast(ones(), 0, group=group)  # bug


@bug(
    "pytorch/pytorch#25390", (3, 4), "dist.new_group(mine)",
    "[dist.new_group([0, 1, 2]), dist.new_group([3, 4])][rank > 2]", ranks=5,
)  # fmt: skip
def only_its_own_group(rank: int, folder: Path) -> None:
    """Each rank made only its own group."""
    mine = [0, 1, 2] if rank < 3 else [3, 4]
    group = dist.new_group(mine)  # bug
    dist.all_reduce(ones(), group=group)


@bug("", 2, " if rank < 2 else None", "")
def group_by_its_members(rank: int, folder: Path) -> None:
    """Only a group's members called `new_group`."""
    pair = dist.new_group([0, 1]) if rank < 2 else None  # bug
    every = dist.new_group()
    dist.all_reduce(ones(), group=every)
    assert rank > 1 or pair


@bug("", 3, "(4, 1) if rank == 3 else ", "", ranks=4)
def mesh_of_another_shape(rank: int, folder: Path) -> None:
    """A rank made a mesh of another shape."""
    shape = (4, 1) if rank == 3 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))  # bug
    dist.all_reduce(ones(), group=mesh.get_group("data"))


@bug("vllm-project/vllm#43547", 3, "if tokens:", "if True:", ranks=4)
def step_without_tokens(rank: int, folder: Path) -> None:
    """Without tokens, a rank skipped one group's call."""
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tokens = 0 if rank == 3 else 8
    if tokens:
        dist.all_reduce(ones(), group=data[rank % 2])  # bug
    dist.all_reduce(ones(), group=tensor[rank // 2])
