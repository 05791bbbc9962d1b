"""Programs that call ``torch.distributed`` and libraries on top of it, and nothing of syncprims.

Each returns numbers that a run on Gloo gives, too. They take no argument: what they need to know is
in the environment, as under torchrun.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

dist: Any = torch.distributed  # its types leave out what its documentation names

Numbers = list[float]

#: Whether FSDP2 of this torch can train on CPUs; that of torch 2.6 cannot, with Gloo either.
FSDP2_TRAINS_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")


def make_model(width: int = 8) -> nn.Sequential:
    """Return a small model with equal parameters on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def make_batch(step: int = 0) -> torch.Tensor:
    """Return a batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(3, 4, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Numbers:
    """Train, and return the losses of this rank."""
    losses: Numbers = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(make_batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def total(model: nn.Module) -> float:
    """Return the sum of the absolute values of all parameters."""
    return sum(parameter.detach().abs().sum().item() for parameter in model.parameters())


def finish() -> None:
    """Close all groups, once every rank has finished."""
    dist.barrier()
    dist.destroy_process_group()


# -- what torch has -------------------------------------------------------------------------------


def ddp() -> Numbers:
    """Train with DDP, with accumulation in `no_sync` and a model of several buckets."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(make_batch(7)).sum().backward()
    losses = train(model, optimizer)
    finish()
    return [*losses, total(model)]


def join() -> Numbers:
    """Train with DDP on uneven inputs."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        losses = train(model, optimizer, steps=2 + dist.get_rank())
    finish()
    return [*losses, total(model)]


def sharded_optimizer() -> Numbers:
    """Train with a sharded optimizer, and exchange objects, reduce in a thread, asynchronously."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(make_model())
    parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    losses = train(model, parts)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (rank, "object"))
    if rank == 0:
        found.reverse()
    dist.broadcast_object_list(found, src=0)
    dist.monitored_barrier(dist.new_group([*range(size)]))
    value: Any = torch.ones(1, requires_grad=True)
    value.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
    thread = threading.Thread(target=(value * (rank + 1)).backward)
    thread.start()
    thread.join()
    work: Any = dist.all_reduce(value.grad, async_op=True)
    work.wait()
    finish()
    return [*losses, total(model), found[0][0], value.grad.item()]


def fsdp2() -> Numbers:
    """Train with the second FSDP in two groups, between which parameters are replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, torch.optim.Adam(model.parameters(), lr=0.1))
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    parameters: list[Any] = list(model.parameters())
    sums = [parameter.full_tensor().abs().sum().item() for parameter in parameters]
    finish()
    return [*losses, norm.full_tensor().item(), *sums]


def dtensor() -> Numbers:
    """Compute with distributed tensors, redistribute them, and compute a loss in parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    a = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    b = distribute_tensor(torch.randn(4, 6), mesh, [Replicate()])
    product: Any = a @ b
    moved = product.redistribute(mesh, [Shard(1)])
    values = [product.sum().full_tensor().item(), moved.to_local().sum().item()]
    logits: Any = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
    logits.requires_grad_()
    with loss_parallel():
        loss: Any = nn.functional.cross_entropy(logits, torch.tensor([0, 2, 4, 5]))
        dist.barrier()  # the other ranks are in their blocks, too
        loss.backward()
    gradients = logits.grad.full_tensor()
    finish()
    return [*values, loss.full_tensor().item(), *gradients.flatten().tolist()]


def functional() -> Numbers:
    """Call the functional collectives, by the name of their group, and one with a gradient."""
    dist.init_process_group("gloo")
    from torch.distributed import _functional_collectives as f
    from torch.distributed.nn import functional  # imported only now

    y = torch.arange(4.0, requires_grad=True)
    parts: Any = functional.all_gather(y)  # type: ignore[no-untyped-call]
    (torch.stack(list(parts)) * (dist.get_rank() + 1)).sum().backward()
    assert y.grad is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    x = torch.arange(size * 2.0) + rank
    values: Numbers = [*y.grad.tolist(), *f.all_reduce(x, "sum", world).tolist()]
    values += f.all_gather_tensor(x, 0, world).tolist()
    values += f.reduce_scatter_tensor(x, "sum", 0, world).tolist()
    values += f.all_to_all_single(x, None, None, world).tolist()
    values += f.broadcast(x, 1, world).tolist()
    finish()
    return values


def pipeline() -> Numbers:
    """Train a pipeline of one stage per rank, by the schedule 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage_module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, y: (out - y).pow(2).mean())
    torch.manual_seed(9)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    gradient = sum(
        p.grad.abs().sum().item() for p in stage_module.parameters() if p.grad is not None
    )
    finish()
    return [gradient, *(loss.item() for loss in losses)]


def checkpoint() -> Numbers:
    """Save and load a sharded model with DCP."""
    import torch.distributed.checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp: Any = torch.distributed.checkpoint
    model: Any = fully_shard(make_model(), mesh=mesh)
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    option = "enable_plan_caching"  # that of torch 2.6 has none
    known = option in inspect.signature(dcp.DefaultSavePlanner).parameters
    for _ in range(2):  # the second save uses the plan of the first
        planner = dcp.DefaultSavePlanner(**({option: True} if known else {}))
        dcp.save(get_model_state_dict(model), checkpoint_id=folder[0], planner=planner)
    files = len([*Path(folder[0]).glob("*.distcp")])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(model, state)
    parameters: list[Any] = list(model.parameters())
    sums = [parameter.full_tensor().abs().sum().item() for parameter in parameters]
    dist.barrier()
    if dist.get_rank() == 0:
        import shutil

        shutil.rmtree(folder[0])
    finish()
    return [files, *sums]


def compiled() -> Numbers:
    """Train a DDP model that torch compiles; its groups are called from within that."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled_model: Any = torch.compile(model, backend="eager")
    losses = train(compiled_model, optimizer)
    finish()
    return [*losses, total(model)]


# -- libraries -------------------------------------------------------------------------------------


def accelerate() -> Numbers:
    """Train with Accelerate: accumulation, a gathered metric, a clipped norm."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(14, 4), torch.randn(14, 2))
    model, loader = make_model(), DataLoader(data, batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: Numbers = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses += accelerator.gather_for_metrics(loss.detach()[None]).tolist()
    accelerator.wait_for_everyone()
    values = [*losses, total(model)]
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return values


def lightning_fabric() -> Numbers:
    """Train with Lightning's Fabric."""
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader, TensorDataset

    size = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader: Any = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
    losses: Numbers = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        mean: Any = fabric.all_reduce(loss.detach())
        losses.append(mean.item())
    values = [*losses, total(model), float(fabric.global_rank)]
    finish()
    return values


LIBRARIES = ["accelerate", "lightning_fabric"]  #: that may be missing
PROGRAMS = [
    ddp, join, sharded_optimizer, fsdp2, dtensor, functional, pipeline, checkpoint, compiled,
    accelerate, lightning_fabric,
]  # fmt: skip
