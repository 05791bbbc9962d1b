"""Accelerate's installed test scripts pass, function by function, on `syncprims.accelerate`.

Left out is what needs several GPUs, a hub or the package datasets, and what differs by intent: a
rank has one world, uneven inputs may be joined in all kinds of worlds and also in streams, and a
state is in one directory for all ranks.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.accelerate_scripts import installed, load, outcomes
from support.rank_worlds import Ranks
from support.training_models import TRAINED

import syncprims

pytestmark = [
    pytest.mark.skipif(installed() is None, reason="needs accelerate"),
    pytest.mark.filterwarnings("default"),
]
kinds = pytest.mark.parametrize(
    "kind", [k for k in TRAINED if str(k) in ("single-1", "file-2", "torch-2")], ids=str,
    indirect=True,
)  # fmt: skip

#: The functions that take nothing, or the state (of `test_ops`).
FUNCTIONS: dict[str, list[str]] = {
    "test_script": [
        "process_execution_check", "init_state_check", "test_split_between_processes_list",
        "test_split_between_processes_nested_dict", "test_split_between_processes_tensor",
        "test_split_between_processes_evenly", "rng_sync_check", "dl_preparation_check",
        "central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler",
        "check_seedable_sampler_with_data_seed", "test_trigger",
    ],
    "test_ops": [
        "test_gather", "test_gather_object", "test_gather_non_contiguous", "test_broadcast",
        "test_pad_across_processes", "test_reduce_sum", "test_reduce_mean", "test_reduce_max",
        "test_op_checker",
    ],
    "test_sync": ["test_dataloader_break"],
    "test_distributed_data_loop": [
        "test_default_ensures_even_batch_sizes", "test_can_disable_even_batches",
        "test_can_join_uneven_inputs", "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders", "test_pickle_accelerator",
    ],
    "external_deps/test_metrics": [
        "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset",
        "test_gather_for_metrics_with_iterable_dataset", "test_gather_for_metrics_drop_last",
    ],
}  # fmt: skip


def calls_of(name: str, script: ModuleType, ranks: int) -> list[tuple[str, Any]]:
    """Return the calls of a script, with their names."""
    s: Any = script
    calls: dict[str, Any] = {}

    def add(function: str, *args: Any, **options: Any) -> None:
        shown = ", ".join([*map(repr, args), *(f"{k}={v}" for k, v in options.items())])
        calls[f"{function}({shown})"] = lambda: getattr(s, function)(*args, **options)

    given = [s.PartialState()] if name == "test_ops" else []
    for function in FUNCTIONS[name]:
        add(function, *given)
    if name == "test_script":
        if ranks > 1:
            add("check_seedable_sampler_in_batch_sampler_shard")
        for seedable in (False, True):
            add("training_check", use_seedable_sampler=seedable)
    elif name == "test_sync":
        job = s.Accelerator()
        one = "test_noop_sync" if ranks == 1 else "test_distributed_sync"
        calls[one] = lambda: getattr(s, one)(job)
        if syncprims.current().backend_name == "torch":
            several = "test_distributed_sync_multiple_fwd"
            calls[several] = lambda: getattr(s, several)(job)
        for options in itertools.product((False, True), repeat=3):  # the last: sync_each_batch
            add("test_gradient_accumulation_with_opt_and_scheduler", *options)
            if ranks > 1:
                add("test_gradient_accumulation", *options)
    elif name == "test_distributed_data_loop":
        job = s.create_accelerator()
        data = s.DummyDataset()
        for kind, loader in {
            "plain": lambda: s.DataLoader(data, batch_size=4),
            "shuffled": lambda: s.DataLoader(data, shuffle=True, batch_size=4),
            "batch_sampler": lambda: s.DataLoader(
                data, batch_sampler=s.BatchSampler(s.RandomSampler(data), 4, False)
            ),
            "sampler of batches": lambda: s.DataLoader(
                data, sampler=s.BatchSampler(s.RandomSampler(data), 4, False), batch_size=None,
                collate_fn=s.default_collate,
            ),
        }.items():  # fmt: skip
            calls[f"test_data_loader, {kind}"] = lambda made=loader: s.test_data_loader(made(), job)
        calls["test_stateful_dataloader"] = lambda: s.test_stateful_dataloader(job)
    elif name == "external_deps/test_metrics":
        for split, dispatch in itertools.product((False, True), repeat=2):
            config = s.DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
            calls[f"test_torch_metrics(99, {split}, {dispatch})"] = lambda c=config: (
                s.test_torch_metrics(s.Accelerator(dataloader_config=c), 99)
            )
        calls["test_torch_metrics(512)"] = lambda: s.test_torch_metrics(s.Accelerator(), 512)
    return list(calls.items())


@kinds
@pytest.mark.parametrize("name", FUNCTIONS)
def test_installed_script(world: Ranks, name: str, tmp_path: Path) -> None:
    if name == "test_distributed_data_loop" and world.ranks != 2:
        pytest.skip("written for two ranks")

    def program() -> dict[str, str]:
        os.chdir(tmp_path)
        script = load(name)
        return outcomes(calls_of(name, script, syncprims.get_world_size()))

    for rank, found in enumerate(world.run(program, ACCELERATE_USE_CPU="yes")):
        failed = {call: why for call, why in found.items() if why}
        assert failed == {}, f"rank {rank}: " + "\n".join(
            f"{call}: {why}" for call, why in failed.items()
        )
