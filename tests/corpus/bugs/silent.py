"""Programs that end without an error, and with wrong weights, data or numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from syncprims import RankMismatch, all_gather, assert_same
from syncprims.testing import assert_dealt

from .bug import Bug, alike, ones, wrapped

SAMPLES = range(10)


class Weights(Bug):
    """Bugs that let weights or buffers of the ranks diverge."""

    rank = 1
    error = RankMismatch
    replicas = True


class SyncOfTheFirst(Weights):
    """Gradients were synchronized at the first micro-batch, not the last."""

    source = "modelscope/FunASR#3472"
    says = "0.weight"

    @staticmethod
    def bug(rank: int, folder: Path) -> Any:
        return SyncOfTheFirst.train(rank, shift=0)

    @staticmethod
    def mended(rank: int, folder: Path) -> Any:
        return SyncOfTheFirst.train(rank, shift=1)

    @staticmethod
    def train(rank: int, shift: int) -> Any:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for batch in range(2):
            model.require_backward_grad_sync = (batch + shift) % 2 == 0
            model(ones() * (rank + batch)).sum().backward()
        optimizer.step()


class UnfrozenLater(Weights):
    """A backbone, frozen when DDP wrapped it, was trained later."""

    source = "Lightning-AI/pytorch-lightning#20340"
    says = "0.weight"

    @staticmethod
    def bug(rank: int, folder: Path) -> Any:
        return UnfrozenLater.train(rank, frozen=True)

    @staticmethod
    def mended(rank: int, folder: Path) -> Any:
        return UnfrozenLater.train(rank, frozen=False)

    @staticmethod
    def train(rank: int, frozen: bool) -> Any:
        backbone = nn.Linear(2, 2).requires_grad_(not frozen)
        model = wrapped(backbone, nn.Linear(2, 1))
        backbone.requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(ones() * (1 + rank)).sum().backward()
        optimizer.step()


class ForwardPastDDP(Weights):
    """The loss was computed by `model.module`, past DDP."""

    source = "jingyaogong/minimind#853"
    says = "0.weight"

    @staticmethod
    def bug(rank: int, folder: Path) -> Any:
        return ForwardPastDDP.train(rank, past=True)

    @staticmethod
    def mended(rank: int, folder: Path) -> Any:
        return ForwardPastDDP.train(rank, past=False)

    @staticmethod
    def train(rank: int, past: bool) -> Any:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        policy = model.module if past else model
        policy(ones() * (1 + rank)).sum().backward()
        optimizer.step()


class StatisticsOfBatchNorm(Weights):
    """Running means of BatchNorm differed between ranks after training."""

    source = "pytorch/pytorch#13711"
    says = "1.running_mean"

    @staticmethod
    def look(model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            assert_same(buffer, name)

    @staticmethod
    def bug(rank: int, folder: Path) -> Any:
        model = wrapped(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model(torch.randn(4, 2) + rank).sum().backward()
        return model.module

    @staticmethod
    def mended(rank: int, folder: Path) -> Any:
        model = wrapped(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model(torch.randn(4, 2) + rank).sum().backward()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
        return model.module


class OwnInitialWeights(Weights):
    """Each rank had initial weights of its own."""

    source = "pytorch/pytorch#75870"
    says = "weight"

    @staticmethod
    def bug(rank: int, folder: Path) -> Any:
        torch.manual_seed(rank)
        return OwnInitialWeights.train(nn.Linear(2, 1))

    @staticmethod
    def mended(rank: int, folder: Path) -> Any:
        torch.manual_seed(rank)
        model = nn.Linear(2, 1)
        for tensor in model.parameters():
            dist.broadcast(tensor.data, 0)
        return OwnInitialWeights.train(model)

    @staticmethod
    def train(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(ones()).sum().backward()
        for tensor in model.parameters():
            assert tensor.grad is not None
            dist.all_reduce(tensor.grad)
        optimizer.step()


class SameAugmentation(Bug):
    """Workers of all ranks drew the same augmentations."""

    source = "huggingface/transformers#37932"
    rank = 1
    error = RankMismatch
    says = "doubled"

    @staticmethod
    def look(draws: list[float]) -> None:
        assert_dealt(draws, [draw for rank in all_gather(draws) for draw in rank])

    @staticmethod
    def bug(rank: int, folder: Path) -> list[float]:
        torch.manual_seed(42)  # of worker 0
        return torch.rand(2).tolist()

    @staticmethod
    def mended(rank: int, folder: Path) -> list[float]:
        torch.manual_seed(42 + rank)
        return torch.rand(2).tolist()


class Samples(Bug):
    """Bugs that deal some samples twice, or never."""

    error = RankMismatch

    @staticmethod
    def look(seen: list[int]) -> None:
        assert_dealt(seen, SAMPLES)


class NoSampler(Samples):
    """The loader had no distributed sampler: each GPU got the same batches."""

    source = "coqui-ai/Trainer#144"
    rank = 1
    says = "doubled: 0 (ranks 0, 1, 2)"

    @staticmethod
    def bug(rank: int, folder: Path) -> list[int]:
        return [int(sample) for sample in DataLoader([*SAMPLES], batch_size=None)]  # type: ignore[arg-type]

    @staticmethod
    def mended(rank: int, folder: Path) -> list[int]:
        return [*SAMPLES][rank :: dist.get_world_size()]


class SeedsOfSamplers(Samples):
    """Each rank gave its sampler another seed."""

    source = "NVlabs/LongLive#71"
    rank = 1
    says = "missing"

    @staticmethod
    def bug(rank: int, folder: Path) -> list[int]:
        return [*DistributedSampler(SAMPLES, seed=rank, drop_last=True)]  # type: ignore[arg-type]

    @staticmethod
    def mended(rank: int, folder: Path) -> list[int]:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(7))
        return order[rank :: dist.get_world_size()].tolist()


class ShardedTwice(Samples):
    """A stream that was split by rank was split once more."""

    source = "huggingface/accelerate#4276"
    rank = 2
    says = "missing"

    @staticmethod
    def bug(rank: int, folder: Path) -> list[int]:
        world = dist.get_world_size()
        return [*SAMPLES][rank::world][rank::world]

    @staticmethod
    def mended(rank: int, folder: Path) -> list[int]:
        return [*SAMPLES][rank :: dist.get_world_size()]


class PaddingInMetrics(Samples):
    """Metrics counted the samples that the sampler repeats as padding."""

    source = "roboflow/rf-detr#1507"
    rank = 2
    says = "padding: 0 (ranks 0, 1), 1 (ranks 1, 2)"

    @staticmethod
    def bug(rank: int, folder: Path) -> list[int]:
        return [*DistributedSampler(SAMPLES, shuffle=False)]  # type: ignore[arg-type]

    @staticmethod
    def mended(rank: int, folder: Path) -> list[int]:
        mine = [*DistributedSampler(SAMPLES, shuffle=False)]  # type: ignore[arg-type]
        world = dist.get_world_size()
        return [sample for i, sample in enumerate(mine) if i * world + rank < len(SAMPLES)]


class ResumedInEpoch0(Samples):
    """A loader resumed epoch 1 in the order of epoch 0."""

    source = "huggingface/accelerate#4071"
    rank = 0
    says = "missing"

    @staticmethod
    def bug(rank: int, folder: Path) -> list[int]:
        return ResumedInEpoch0.epoch(rank, resumed=0)

    @staticmethod
    def mended(rank: int, folder: Path) -> list[int]:
        return ResumedInEpoch0.epoch(rank, resumed=1)

    @staticmethod
    def epoch(rank: int, resumed: int) -> list[int]:
        def order(epoch: int) -> list[int]:
            whole = torch.randperm(10, generator=torch.Generator().manual_seed(epoch))
            return whole[rank :: dist.get_world_size()].tolist()

        return order(1)[:2] + order(resumed)[2:]


class MeanOfMeans(Bug):
    """Means of each rank's tokens were averaged, whatever their numbers."""

    source = "vllm-project/speculators#942"
    rank = 0
    error = AssertionError
    check = staticmethod(alike(2.0))  # of the tokens 0, 1, 2, 3, 4

    @staticmethod
    def bug(rank: int, folder: Path) -> float:
        tokens = [[0.0], [1.0], [2.0, 3.0, 4.0]][rank]
        loss = torch.tensor(sum(tokens) / len(tokens))
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    @staticmethod
    def mended(rank: int, folder: Path) -> float:
        tokens = [[0.0], [1.0], [2.0, 3.0, 4.0]][rank]
        total = torch.tensor([sum(tokens), len(tokens)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


class ScheduleOncePerRank(Bug):
    """The schedule made a step for each process."""

    source = "huggingface/accelerate#2926"
    rank = 0
    error = AssertionError
    check = staticmethod(alike(0.25))  # after two steps

    @staticmethod
    def bug(rank: int, folder: Path) -> float:
        return ScheduleOncePerRank.train(dist.get_world_size())

    @staticmethod
    def mended(rank: int, folder: Path) -> float:
        return ScheduleOncePerRank.train(1)

    @staticmethod
    def train(times: int) -> float:
        optimizer = torch.optim.SGD([nn.Parameter(ones())], 1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            optimizer.step()
            for _ in range(times):
                schedule.step()
        return float(schedule.get_last_lr()[0])
