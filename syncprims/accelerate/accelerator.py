"""The Accelerator with Accelerate's arguments, in their order, and with Accelerate's defaults."""

from __future__ import annotations

import os
from typing import Any

from syncprims.training import accelerate as job

from .utils.dataclasses import DataLoaderConfiguration
from .utils.dataclasses import GradientAccumulationPlugin as GradientAccumulationPlugin


class DropInAccelerator(job.Accelerator):
    """:class:`syncprims.training.Accelerator` with the defaults that Accelerate's scripts rely on.

    Arguments that have no meaning here are refused with what to do instead. `docs/training.md`
    lists how the two sets of defaults differ.
    """

    is_fsdp2 = False
    deepspeed_plugin = parallelism_config = torch_device_mesh = None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Any = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Any = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        **others: Any,
    ) -> None:
        data = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        self._data = data
        super().__init__(
            gradient_accumulation_steps,
            getattr(mixed_precision, "value", mixed_precision)
            or os.environ.get("ACCELERATE_MIXED_PRECISION"),
            cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"),
            project_dir,
            step_scheduler_with_optimizer,
            device_placement=device_placement,
            split_batches=split_batches,
            step_schedule_per_rank=True,
            divide_by_steps=True,
            order=_order(data),
            dispatch_streams=True,
            resume_loaders=data.use_stateful_dataloader,
            skip_finished=True,
            save_together=False,
            unwrap_for_hooks=True,
            log_with=log_with,
            dataloader_config=data,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            project_config=project_config,
            kwargs_handlers=kwargs_handlers,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            rng_types=rng_types,
            dynamo_backend=None if dynamo_backend in (None, "no", "NO") else dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
            **others,
        )
        self.step = 0  #: of the script, if it counts here

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self.preparation.options.device_placement

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of shuffled data follows from a seed."""
        return bool(self._data.use_seedable_sampler)

    @property
    def multi_device(self) -> bool:
        """Whether there are other ranks, on accelerators."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def dataloader_config(self) -> Any:
        """How loaders are prepared. It can be set, for those that are prepared from then on."""
        return self._data

    @dataloader_config.setter
    def dataloader_config(self, data: Any) -> None:
        self._data, options = data, self.preparation.options
        for name in ("split_batches", "dispatch_batches", "even_batches", "non_blocking"):
            setattr(options, name, getattr(data, name))
        options.seed, options.order = data.data_seed, _order(data)
        self._resume_loaders = data.use_stateful_dataloader


def _order(data: Any) -> str:
    """Return the order of shuffled data that a configuration asks for."""
    if data.use_stateful_dataloader:
        return "seeded"  # the only one that a state can hold
    return "seedable" if data.use_seedable_sampler else "torch"


Accelerator = DropInAccelerator
