"""Strides of dense tensors are kept wherever these travel or are stored."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_every_rank, several
from safetensors.torch import load_file
from support.checkpoint_worlds import Alone, Kept
from torch import nn

import syncprims as sp
from syncprims.training import Accumulator, join_uneven_inputs, load_state, prepare, save_state
from syncprims.training.checkpoints.integrity import BLANK, SEAL, dump, put_seal

NHWC = torch.channels_last


def tensors(large: int) -> list[torch.Tensor]:
    """Return tensors of many layouts: dense ones first, then others, which become contiguous."""
    x = torch.arange(2.0 * 3 * 5 * 4 * large).reshape(2, 3, 5, 4 * large)
    dense = [x.to(memory_format=NHWC), x.permute(3, 0, 2, 1), x.transpose(1, 2), x[0].mT]
    dense += [x.bfloat16().to(memory_format=NHWC), x.reshape(2, 3, 5, 2, -1).permute(4, 0, 3, 1, 2)]
    if large == 1:
        dense += [torch.ones(4, 3, 1, 1).to(memory_format=NHWC)]  # of one item in a dimension
        dense += [torch.zeros(0, 3, 2, 2).to(memory_format=NHWC), torch.tensor(3.0)]
        dense += [torch.empty_strided((3, 1, 4), (4, 99, 1)).fill_(2)]
    return [*dense, x[:, ::2], x[:, :1], x[0, 0].expand(2, 5, 4 * large), x.mT[::2]]


def check_copy(copy: Any, of: torch.Tensor, times: int = 1) -> None:
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(of) or not of.numel()
    assert torch.equal(copy, of * times)
    assert copy.stride() == (of.stride() if is_dense else of.contiguous().stride())


@several()
@on_every_rank
def test_values_keep_their_layouts_between_ranks() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    # Of all sizes: in notes, in slots, and through the transport.
    for tensor in [*tensors(1), *tensors(1)[:2], *tensors(40)[::4], tensors(8000)[0]]:
        check_copy(sp.all_reduce(tensor), tensor, n)
        check_copy(sp.all_reduce({"a": [tensor]})["a"][0], tensor, n)
        mixed = tensor if rank == 0 else tensor.contiguous()  # each rank keeps its own
        check_copy(sp.all_reduce(mixed), mixed, n)
        for got in (sp.broadcast(tensor if rank == 0 else None), *sp.all_gather(tensor)):
            if got is not tensor:  # the sender's is the very object
                check_copy(got, tensor)
        tree: Any = sp.broadcast({"x": [tensor, 1]} if rank == n - 1 else None, n - 1)
        if rank != n - 1:
            check_copy(tree["x"][0], tensor)
        if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
            for out in (torch.zeros_like(tensor), tensor.contiguous() * 0):
                before = out.stride()
                assert sp.broadcast(tensor if rank == 0 else None, out=out) is out
                assert torch.equal(out, tensor)
                assert sp.all_reduce(tensor, out=out) is out
                assert torch.equal(out, tensor * n)
                assert out.stride() == before
        sp.assert_same(mixed, "values")
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    sent: Any = sp.broadcast(fortran if rank == 0 else None)  # of arrays, the values travel
    assert (sent == fortran).all()
    assert rank == 0 or sent.flags.c_contiguous


# -- training with fused kernels -------------------------------------------------------------------


class Net(nn.Module):
    """A net with parameters in several layouts; one rank alone may use the second branch."""

    def __init__(self, memory_format: Any = NHWC) -> None:
        super().__init__()
        torch.manual_seed(0)
        branches: list[Any] = [nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3)]
        self.conv, self.rare = [one.to(memory_format=memory_format) for one in branches]
        self.volume = nn.Conv3d(1, 2, 2)
        if memory_format is NHWC:
            self.volume.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5, 6).t())

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        seen = self.conv(x) + (self.rare(x) if rare else 0.0)
        volume: torch.Tensor = self.volume(x[:, None])
        total: torch.Tensor = (seen.mean((2, 3)) @ self.turned).sum()
        return total + volume.square().sum()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, 0.01, fused=True, amsgrad=True),
    lambda p: torch.optim.Adam(p, 0.01, fused=True),
    lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True),
    lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
    lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9),
]


def step(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    torch.manual_seed(number)
    net(torch.randn(2, 3, 6, 6).to(memory_format=NHWC), rare=number % 2 == 0).backward()
    optimizer.step()


def bits(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_a_resume_with_fused_kernels_is_as_with_torch_save(tmp_path: Path, alone: Alone) -> None:
    def program() -> None:
        for number, make in enumerate(OPTIMIZERS):
            net = Net()
            optimizer = make(net.parameters())
            step(net, optimizer, 0)
            path = tmp_path / str(number)
            save_state(path, {"net": net, "optimizer": optimizer}, block=number % 2 == 0).wait()
            step(net, optimizer, 1)
            resumed = Net()
            other = make(resumed.parameters())
            load_state(path, {"net": resumed, "optimizer": other})
            for ours, theirs in zip(
                other.state_dict()["state"].values(), optimizer.state_dict()["state"].values(),
                strict=True,
            ):  # fmt: skip
                for key, value in theirs.items():
                    assert ours[key].stride() == value.stride(), key
            step(resumed, other, 1)
            assert all(map(torch.equal, bits(net), bits(resumed)))

    alone(program)


def test_a_model_of_another_layout_takes_the_state(tmp_path: Path, alone: Alone) -> None:
    """So does one that finds a checkpoint without layouts, as earlier versions have made it."""

    def program() -> None:
        make = OPTIMIZERS[0]
        net = Net()
        optimizer = make(net.parameters())
        step(net, optimizer, 0)
        save_state(tmp_path / "a", {"net": net, "optimizer": optimizer})
        step(net, optimizer, 1)
        for earlier, form, whole in itertools.product((False, True), (NHWC, None), (True, False)):
            resumed = Net(form or torch.contiguous_format)
            other = make(resumed.parameters())
            if earlier:
                forget_layouts(tmp_path / "a" / "checkpoint.json")
            objects: dict[str, Any] = {"net": resumed, "optimizer": other}
            load_state(tmp_path / "a", objects if whole else {"optimizer": other}, strict=whole)
            for p in resumed.parameters():
                assert other.state[p]["exp_avg"].stride() == p.stride()
            step(resumed, other, 1)
            for mine, theirs in zip(bits(resumed), bits(net), strict=True):
                assert not whole or torch.allclose(mine, theirs, atol=1e-6)

    alone(program)


def forget_layouts(manifest: Path) -> None:
    """Rewrite a manifest as an earlier version would have written it."""

    def without(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: without(value) for key, value in node.items() if key != "strides"}
        return [without(item) for item in node] if isinstance(node, list) else node

    document = without(json.loads(manifest.read_bytes()))
    manifest.write_bytes(put_seal(dump({**document, SEAL: BLANK})))


def test_files_stay_ordinary_and_wrong_strides_are_refused(tmp_path: Path, alone: Alone) -> None:
    def program() -> None:
        state = {str(i): tensor for i, tensor in enumerate(tensors(1))}
        state["tied"] = state["0"]
        state["array"] = np.asfortranarray(np.arange(6.0).reshape(2, 3))  # type: ignore[assignment]
        save_state(tmp_path / "a", {"kept": Kept(state)})
        (file,) = (tmp_path / "a").glob("kept*.safetensors")
        ordinary = load_file(file)
        loaded = Kept()
        load_state(tmp_path / "a", {"kept": loaded})
        array = loaded.state.pop("array")
        assert (array == state.pop("array")).all()
        for name, tensor in state.items():
            check_copy(loaded.state[name], tensor)
            assert name == "tied" or torch.equal(ordinary[name], tensor)
        assert loaded.state["tied"] is loaded.state["0"]
        manifest = tmp_path / "a" / "checkpoint.json"
        document = json.loads(manifest.read_bytes())
        node = document["objects"]["kept"][0]["0"]
        for strides in ([1], [0, 0, 0, 0], [1 << 62] * 4, [-60, 1, 12, 3], ["1"] * 4, 5, {"a": 1}):
            node["strides"] = strides
            manifest.write_bytes(put_seal(dump({**document, SEAL: BLANK})))
            with pytest.raises(sp.CheckpointError, match=r"checkpoint\.json"):
                load_state(tmp_path / "a", {"kept": Kept()})

    alone(program)


@several(2)
@on_every_rank
def test_ranks_stay_equal_where_one_alone_uses_a_layer() -> None:
    def try_with(make: Callable[[Any], torch.optim.Optimizer]) -> None:
        net = Net()
        accumulator = Accumulator(1)
        model, optimizer = prepare(
            *(net, make(net.parameters())), accumulator=accumulator,
            ddp={"find_unused_parameters": True},
        )  # fmt: skip

        def train(numbers: range) -> None:
            for number in numbers:
                with accumulator.accumulate(model):
                    optimizer.zero_grad()
                    torch.manual_seed(number)
                    x = torch.randn(2, 3, 6, 6).to(memory_format=NHWC)
                    accumulator.backward(model(x, rare=sp.get_rank() == 1))
                    optimizer.step()
            for p in net.parameters():
                assert p.grad is None or p.grad.stride() == p.stride()

        train(range(2))
        with join_uneven_inputs(accumulator):
            train(range(2, 3 + sp.get_rank()))  # rank 0 takes the state of the other over
        train(range(5, 7))
        sp.assert_same(bits(net), "parameters")

    for make in OPTIMIZERS:
        try_with(make)
