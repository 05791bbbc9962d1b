"""What is installed, and what the device can do."""

from __future__ import annotations

import operator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch.torch_version import TorchVersion

#: Names of questions about a package, and the package.
_PACKAGES = {
    "datasets": "datasets", "transformers": "transformers", "tensorboard": "tensorboard",
    "wandb": "wandb", "mlflow": "mlflow", "rich": "rich", "peft": "peft", "timm": "timm",
    "torchvision": "torchvision", "torchdata": "torchdata", "pandas": "pandas",
    "matplotlib": "matplotlib", "pytest": "pytest", "bnb": "bitsandbytes", "boto3": "boto3",
    "comet_ml": "comet_ml", "clearml": "clearml", "dvclive": "dvclive", "aim": "aim",
    "swanlab": "swanlab", "trackio": "trackio", "triton": "triton", "torchao": "torchao",
    "schedulefree": "schedulefree", "lomo": "lomo_optim", "pynvml": "pynvml",
}  # fmt: skip
#: What does not run here, installed or not.
_NEVER = {
    "deepspeed", "megatron_lm", "torch_xla", "transformer_engine", "msamp", "fp8", "npu", "mlu",
    "musa", "sdaa", "hpu", "neuron", "habana_gaudi1", "sagemaker", "pippy", "rocm", "ccl", "ipex",
    "xccl", "4bit_bnb", "8bit_bnb", "amdsmi", "transformer_engine_mxfp8",
}  # fmt: skip


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available(min_version: str = "") -> bool:
    """Return whether there is an MPS device."""
    del min_version
    return torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether there is an XPU device."""
    del check_device
    return hasattr(torch, "xpu") and torch.xpu.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device computes in bf16."""
    del ignore_tpu
    return torch.cuda.is_bf16_supported() if is_cuda_available() else not is_mps_available()


def is_fp16_available() -> bool:
    """Return whether the device computes in fp16."""
    return True


def is_weights_only_available() -> bool:
    """Return whether torch loads weights without running code: always."""
    return True


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether loaders have a state: always."""
    return True


def compare_versions(library_or_version: Any, operation: str, requirement: str) -> bool:
    """Return whether a version, or that of an installed library, is ``>=`` or the like another.

    :raises KeyError: if `operation` is no comparison.
    """
    known = {">": "gt", ">=": "ge", "==": "eq", "!=": "ne", "<=": "le", "<": "lt"}
    found = str(library_or_version)
    if not found[0].isdigit():
        found = version(found)
    return bool(getattr(operator, known[operation])(TorchVersion(found), requirement))


def is_torch_version(operation: str, requirement: str) -> bool:
    """Return whether torch's version is ``>=`` or the like another."""
    return compare_versions(torch.__version__, operation, requirement)


def question(name: str) -> Any:
    """Return the function of this name, ``is_..._available``; None if there is no such question."""
    topic = name.removeprefix("is_").removesuffix("_available")

    def answer(*_: Any, **__: Any) -> bool:
        return topic not in _NEVER and find_spec(_PACKAGES[topic]) is not None

    known = topic in _NEVER or (topic in _PACKAGES and name == f"is_{topic}_available")
    return answer if known else None


def __getattr__(name: str) -> Any:
    found = question(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
