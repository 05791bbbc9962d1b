"""The names of `syncprims.accelerate`, and what scripts expect of them."""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KINDS, on_every_rank
from support.rank_worlds import Ranks
from support.training_models import alone, everywhere, feed, gradient, numbers, unit_model

from syncprims import accelerate, get_rank
from syncprims.accelerate import Accelerator, PartialState, debug_launcher, utils
from syncprims.accelerate.logging import get_logger
from syncprims.accelerate.state import AcceleratorState, GradientState

in_threads = pytest.mark.parametrize(
    "kind", [k for k in KINDS if str(k) == "threads-2"], ids=str, indirect=True
)


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("", "DeepSpeedPlugin", "fully_shard"),
        (".utils", "MegatronLMPlugin", "Megatron-LM itself"),
        ("", "cpu_offload", "load_checkpoint_in_model"),
        (".big_modeling", "dispatch_model", "device_map"),
        (".utils", "DummyOptim", "of torch"),
        (".tracking", "CometMLTracker", "log_with"),
        ("", "ParallelismConfig", "torch's own means"),
        (".utils.modeling", "get_max_layer_size", "device_map"),
        (".data_loader", "SkipDataLoader", "skip_first_batches"),
        (".data_loader", "BatchSamplerShard", "prepare"),
        (".utils", "find_tied_parameters", "accelerate.utils"),
        (".hooks", "SequentialHook", "register_forward_hook"),
        (".checkpointing", "load_accelerator_state", "load_state"),
        (".utils.constants", "STR_OPERATION_TO_FUNC", "accelerate.utils"),
    ],
)
def test_what_is_not_offered_names_the_way(module: str, name: str, said: str) -> None:
    found: Any = getattr(importlib.import_module(f"syncprims.accelerate{module}"), name)
    assert not isinstance(1, found)
    with pytest.raises(NotImplementedError, match=said):
        found(stage=2)
    with pytest.raises(NotImplementedError, match=said):
        _ = found.FULL_SHARD
    assert not hasattr(importlib.import_module(f"syncprims.accelerate{module}"), "nonsense")


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("data_loader", "send_to_device", "utils"),
        ("accelerator", "PartialState", "state"),
        ("tracking", "get_logger", "logging"),
        ("optimizer", "AcceleratorState", "state"),
        ("memory_utils", "find_executable_batch_size", "utils"),
        ("local_sgd", "Accelerator", "accelerator"),
    ],
)
def test_modules_have_the_names_that_accelerates_import(module: str, name: str, home: str) -> None:
    of, where = (f"syncprims.accelerate.{one}" for one in (module, home))
    assert getattr(importlib.import_module(of), name) is getattr(sys.modules[where], name)


def test_questions_that_scripts_ask() -> None:
    assert utils.is_pytest_available()
    assert not utils.is_deepspeed_available()
    assert utils.is_torch_distributed_available()
    with pytest.raises(AttributeError, match="has no attribute 'is_pytets_available'"):
        utils.is_pytets_available()
    installed = importlib.util.find_spec("torchdata") is not None
    assert utils.is_torchdata_stateful_dataloader_available() == installed
    answers = [utils.str_to_bool("yes"), utils.str_to_bool("off", to_bool=True)]
    assert str(answers) == "[1, False]"
    assert utils.is_torch_version(">=", "2.0")
    assert utils.compare_versions("1.10", ">", "1.9")
    assert utils.compare_versions(accelerate.__version__, ">=", "1.0")
    assert utils.compare_versions("torch", "!=", "1.0")
    assert not utils.is_peft_model(torch.nn.Linear(1, 1))
    kind = type("PeftModel", (torch.nn.Module,), {"__module__": "peft.peft_model"})
    assert utils.is_peft_model(torch.nn.DataParallel(kind()))


@alone
@on_every_rank
def test_whether_there_is_an_accelerator() -> None:
    before = accelerate.state.is_initialized()
    job = Accelerator(cpu=True)
    plugin = AcceleratorState().deepspeed_plugin
    attributes = (job.device_placement, job.use_seedable_sampler, job.multi_device)
    assert [before, accelerate.state.is_initialized(), plugin, attributes] == [
        False,
        True,
        None,
        (True, False, False),
    ]


@in_threads
def test_loggers(world: Ranks) -> None:
    def program() -> str:
        stream = io.StringIO()
        logger = get_logger(f"of rank {get_rank()}", log_level="INFO")
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(funcName)s %(message)s"))
        logger.logger.addHandler(handler)
        logger.logger.propagate = False
        logger.info("main %s", "only", stacklevel=2)  # the line of the call, as there
        logger.info("all", main_process_only=False)
        logger.warning("in turn", in_order=True)
        logger.debug("not shown", in_order=True)
        for _ in range(2):
            of_all.warning_once(f"of {get_rank()}", main_process_only=False)
            logger.warning_once("once")
        return stream.getvalue()

    of_all, shared = get_logger("of all ranks"), io.StringIO()
    of_all.logger.addHandler(logging.StreamHandler(shared))
    root = logging.getLogger().level
    try:
        first, second = world.run(program)
    finally:
        logging.getLogger().setLevel(root)
        of_all.logger.handlers.clear()
    assert first.splitlines() == [
        "program [RANK 0] main only",
        "program [RANK 0] all",
        "program [RANK 0] in turn",
        "warning_once [RANK 0] once",
    ]
    assert second.splitlines() == ["program [RANK 1] all", "program [RANK 1] in turn"]
    assert sorted(shared.getvalue().splitlines()) == ["[RANK 0] of 0", "[RANK 1] of 1"]


@in_threads
def test_bars_are_shown_on_main(world: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # it is a thread

    def program() -> list[Any]:
        stream = io.StringIO()
        bar = utils.tqdm(range(3), "a name", file=stream)
        with pytest.raises(ValueError, match="main_process_only=True"):
            utils.tqdm(True, range(3))
        return [list(bar), "a name" in stream.getvalue()]

    assert world.run(program) == [[[0, 1, 2], True], [[0, 1, 2], False]]


@alone
@on_every_rank
def test_a_job_is_one_object() -> None:
    job = Accelerator(cpu=True)
    assert copy.deepcopy({"of": job})["of"] is job
    AcceleratorState._reset_state(True)
    assert Accelerator(cpu=True).num_processes == 1
    loader = accelerate.skip_first_batches(dataloader=feed([1, 2, 3]), num_batches=2)
    assert [batch.tolist() for batch in loader] == [[3]]


@in_threads
@on_every_rank
def test_states_are_printed_as_there() -> None:
    """On one rank, `test_surface.py` compares the text."""
    job = Accelerator(cpu=True)
    assert str(job.state) == (
        "Distributed environment: DistributedType.MULTI_CPU  Backend: threads\n"
        f"Num processes: 2\nProcess index: {get_rank()}\nLocal process index: {get_rank()}\n"
        "Device: cpu\n\nMixed precision type: no\n"
    )
    assert PartialState._shared_state is job.state.__dict__
    assert job.gradient_state.dataloader_references == [None]
    with job.maybe_context_parallel(buffers=[], buffer_seq_dims=[]):
        pass


def test_models_without_memory_keep_their_buffers() -> None:
    def devices(model: torch.nn.Module) -> list[str]:
        tensors = (*model.parameters(), *model.buffers())
        return [tensor.device.type for tensor in tensors if tensor.ndim]

    with accelerate.init_empty_weights():
        some = torch.nn.BatchNorm1d(2)
        first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        second.weight = first.weight
    with accelerate.init_empty_weights(include_buffers=True):
        none = torch.nn.BatchNorm1d(2)
    assert devices(some) == ["meta", "meta", "cpu", "cpu"]
    assert devices(none) == ["meta"] * 4
    assert devices(torch.nn.Linear(1, 1)) == ["cpu", "cpu"]
    assert second.weight is first.weight


@in_threads
@on_every_rank
def test_operations() -> None:
    """What Accelerate's own script of operations does not try."""
    state = PartialState(cpu=True)
    assert PartialState().__dict__ is state.__dict__
    assert utils.broadcast_object_list([f"from {state.process_index}", 1]) == ["from 0", 1]
    batch = {"x": torch.ones(2, 3), "y": [torch.zeros(2)]}
    assert utils.find_batch_size(batch) == 2
    assert utils.send_to_device(batch, "meta", skip_keys="y")["y"][0].device.type == "cpu"


@in_threads
def test_a_batch_size_that_fits_all_ranks(world: Ranks) -> None:
    def program() -> list[int]:
        tried: list[int] = []

        @utils.find_executable_batch_size(starting_batch_size=100)  # type: ignore[untyped-decorator]
        def train(batch_size: int) -> int:
            tried.append(batch_size)
            if get_rank() == 1 and batch_size > 80:
                raise RuntimeError("CUDA out of memory.")
            return batch_size

        assert train() == train() == 72
        return tried

    assert world.run(program) == [[100, 90, 81, 72, 72]] * 2


@everywhere
@on_every_rank
def test_the_state_of_the_window() -> None:
    job = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain: Any = unit_model()
    model, optimizer, loader = job.prepare(
        plain,
        torch.optim.SGD(plain.parameters(), lr=1.0),
        feed([torch.ones(1)] * (3 * job.num_processes), batch_size=1),
    )
    state, seen, gradients = GradientState(), [], []
    for batch in loader:
        with job.accumulate(model):
            job.backward(model(batch).mean())
            gradients.append(gradient(model))
            optimizer.step()
            optimizer.zero_grad()
        assert state.active_dataloader is loader
        assert state.remainder == 0
        seen.append((state.sync_gradients, state.end_of_dataloader))
    assert not state.in_dataloader
    assert (state.num_steps, state.remainder) == (2, -1)
    assert AcceleratorState().mixed_precision == "no"
    model(torch.ones(1, 1)).sum().backward()
    job.sync_gradients = False
    optimizer.step()
    before = numbers(model)[0]
    job.sync_gradients = True
    optimizer.step()
    windows = [(False, False), (True, False), (True, True)]
    assert gradients == [0.5, 1.0, 0.5]  # divided by the steps at once, in the tail, too
    assert [seen, before, numbers(model)[0]] == [windows, -1.5, -2.5]


@alone
def test_launchers_start_ranks(world: Ranks, tmp_path: Path) -> None:
    def rank(name: str) -> None:
        state = PartialState()
        (tmp_path / f"{name}-{state.process_index}-of-{state.num_processes}").touch()
        assert os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16") == "bf16"

    del world
    debug_launcher(rank, ("debug",))
    accelerate.notebook_launcher(rank, ("notebook",), num_processes=2, mixed_precision="bf16")
    assert sorted(path.name for path in tmp_path.glob("*-of-*")) == [
        "debug-0-of-2",
        "debug-1-of-2",
        "notebook-0-of-2",
        "notebook-1-of-2",
    ]
    with pytest.raises(ValueError, match="torchrun"):
        accelerate.notebook_launcher(rank, num_nodes=2)
    with pytest.raises(TypeError, match="'num_proceses'"):
        accelerate.notebook_launcher(rank, num_proceses=2)
