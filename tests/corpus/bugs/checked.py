"""Wrong weights, samples and numbers, in programs whose calls are right."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from syncprims import assert_same
from syncprims.testing import assert_dealt

from .bug import bug, ones, wrapped

SAMPLES: Any = range(12)


def gathered(value: Any) -> list[Any]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def joined(values: list[Any]) -> list[Any]:
    return [value for every in gathered(values) for value in every]


def tensors(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def same_in_torch(model: nn.Module) -> None:
    for name in tensors(model):
        every = gathered(tensors(model)[name])
        assert all(it == every[0] for it in every), f"{name} differs: {every}"


def dealt_in_torch(seen: list[Any]) -> None:
    every = sorted(joined(seen))
    assert len({*every}) == len(every) == 12, f"samples are missing or doubled: {every}"


def number(right: float) -> dict[str, Any]:
    def look(result: float) -> None:
        assert abs(result - right) < 1e-6, f"{result}, where {right} is right"

    return {"check": (look, look), "says": f"where {right} is right"}


def same_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        assert_same(buffer, name)


WEIGHTS = {"check": (lambda _: None, same_in_torch), "replicas": True, "says": "0.weight"}
BUFFERS = {"check": (same_buffers, same_in_torch), "says": "1.running_mean"}
DEALT = {"check": (lambda seen: assert_dealt(seen, SAMPLES), dealt_in_torch), "says": "samples"}
DRAWN = {"check": (lambda it: assert_dealt(it, joined(it)), dealt_in_torch)}


def train(model: nn.Module, rank: int, forward: Callable[[torch.Tensor], Any] | None = None) -> Any:
    """Take one step, and return the model within DDP."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (forward or model)(ones() * (1 + rank)).sum().backward()
    optimizer.step()
    return getattr(model, "module", model)


@bug("modelscope/FunASR#3472", (), "batch == 0", "batch == 1", **WEIGHTS)
def synchronized_at_the_first(rank: int, folder: Path) -> Any:
    """Gradients were synchronized at the first micro-batch, not the last."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in range(2):
        model.require_backward_grad_sync = batch == 0
        model(ones() * (rank + batch)).sum().backward()
    optimizer.step()
    return model.module


@bug("Lightning-AI/pytorch-lightning#20340", (), "requires_grad_(False)", "train()", **WEIGHTS)
def unfrozen_later(rank: int, folder: Path) -> Any:
    """A backbone, frozen when DDP wrapped it, was trained later."""
    backbone = nn.Linear(2, 2).requires_grad_(False)
    model = wrapped(backbone, nn.Linear(2, 1))
    backbone.requires_grad_()
    return train(model, rank)


@bug("jingyaogong/minimind#853", (), "model.module)", "model)", **WEIGHTS)
def forward_past_ddp(rank: int, folder: Path) -> Any:
    """The loss was computed by `model.module`, past DDP."""
    model = wrapped()
    return train(model, rank, model.module)


@bug("pytorch/pytorch#13711", (), "model.children()", "model.buffers()", **BUFFERS)
def statistics_of_batch_norm(rank: int, folder: Path) -> Any:
    """Running means of BatchNorm differed between ranks after training."""
    model = wrapped(nn.Linear(2, 2), nn.BatchNorm1d(2)).module
    model(torch.randn(4, 2) + rank)
    for buffer in model.children():
        if isinstance(buffer, torch.Tensor):
            dist.broadcast(buffer, 0)
    return model


@bug("pytorch/pytorch#75870", (), "[:0]", "", **WEIGHTS)
def own_initial_weights(rank: int, folder: Path) -> Any:
    """Each rank had initial weights of its own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 1))
    for weight in [*model.parameters()][:0]:
        dist.broadcast(weight.data, 0)
    return train(model, 0)


@bug("mosaicml/composer#2146", (), "1 if rank == 1 else ", "", **WEIGHTS)
def older_checkpoint(rank: int, folder: Path) -> Any:
    """After a restart, one rank resumed from an older checkpoint than the others."""
    model = wrapped()
    for step in (1, 2):
        state = {name: torch.full_like(it, step) for name, it in model.module.state_dict().items()}
        torch.save(state, folder / f"{rank} of step {step}")
    latest = 1 if rank == 1 else 2
    model.module.load_state_dict(torch.load(folder / f"{rank} of step {latest}"))
    return train(model, rank)


@bug("pytorch/pytorch#136009", (), "8.0 if rank == 1 else ", "", **WEIGHTS)
def scales_differ(rank: int, folder: Path) -> Any:
    """The scale of a rank's GradScaler differed, and so did the gradients."""
    model = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if rank == 1 else 4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(ones()).sum()).backward()
    scaler.step(optimizer)
    return model.module


@bug("lucidrains/DALLE-pytorch#268", (), "step(loss)", "step(mean)", **WEIGHTS)
def plateau_of_one_rank(rank: int, folder: Path) -> Any:
    """A schedule looked at the loss of its rank, and the learning rates differed."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(3):
        optimizer.zero_grad()
        model(ones()).sum().backward()
        optimizer.step()
        loss = torch.tensor(float(step if rank == 1 else -step))
        mean = loss.clone()
        dist.all_reduce(mean)
        schedule.step(loss)
    return model.module


class Augmented(Dataset[float]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> float:
        return random.random()


@bug("huggingface/transformers#37932", (), "seed(42)", "seed(42 + rank)", **DRAWN, says="doubled")
def same_augmentation(rank: int, folder: Path) -> list[float]:
    """Workers of all ranks drew the same augmentations."""
    loader = DataLoader(
        Augmented(), batch_size=None, num_workers=1, multiprocessing_context="fork",
        worker_init_fn=lambda _: random.seed(42),
    )  # fmt: skip
    return [float(draw) for draw in loader]


@bug("coqui-ai/Trainer#144", (), "sampler=None", "sampler=sampler", **DEALT)
def no_sampler(rank: int, folder: Path) -> list[int]:
    """The loader had no distributed sampler: each GPU got the same batches."""
    sampler: Any = DistributedSampler(SAMPLES)
    assert sampler
    return [int(it) for it in DataLoader(SAMPLES, batch_size=None, sampler=None)]


@bug("NVlabs/LongLive#71", (), "seed=rank", "seed=7", **DEALT)
def seeds_of_samplers(rank: int, folder: Path) -> list[int]:
    """Each rank gave its sampler another seed."""
    return [*DistributedSampler(SAMPLES, seed=rank)]


@bug("huggingface/accelerate#4276", (), "mine[rank::3]", "mine", **DEALT)
def sharded_twice(rank: int, folder: Path) -> list[int]:
    """A stream that was split by rank was split once more."""
    mine = [*SAMPLES][rank::3]
    return mine[rank::3]


@bug("huggingface/accelerate#4071", (), "order(0)", "order(1)", **DEALT)
def resumed_in_epoch_0(rank: int, folder: Path) -> list[int]:
    """A loader resumed epoch 1 in the order of epoch 0."""

    def order(epoch: int) -> list[int]:
        sampler: Any = DistributedSampler(SAMPLES)
        sampler.set_epoch(epoch)
        return [*sampler]

    seen = order(1)[:2]
    return seen + order(0)[2:]


@bug("roboflow/rf-detr#1507", (), "[*sampler]", "[*sampler][: 4 - (rank > 0)]", **number(10))
def padding_in_metrics(rank: int, folder: Path) -> float:
    """Metrics counted the samples that the sampler repeats as padding."""
    ten: Any = range(10)
    sampler: Any = DistributedSampler(ten, shuffle=False)
    count = torch.tensor(len([*sampler]))
    dist.all_reduce(count)
    return count.item()


@bug("vllm-project/speculators#942", (), "len(tokens) / 3", "5", **number(2.0))
def mean_of_means(rank: int, folder: Path) -> float:
    """Means of each rank's tokens were averaged, whatever their numbers."""
    tokens = [[0.0], [1.0], [2.0, 3.0, 4.0]][rank]
    loss = torch.tensor(sum(tokens) / len(tokens) / 3)
    dist.all_reduce(loss)
    return loss.item()


@bug("huggingface/accelerate#2926", (), "range(3)", "range(1)", **number(0.25))
def schedule_once_per_rank(rank: int, folder: Path) -> float:
    """The schedule made a step for each process."""
    optimizer = torch.optim.SGD([nn.Parameter(ones())], 1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        optimizer.step()
        for _ in range(3):
            schedule.step()
    return float(schedule.get_last_lr()[0])
