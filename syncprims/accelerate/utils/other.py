"""Helpers of scripts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import torch

import syncprims
from syncprims.training import unwrap_model
from syncprims.training.checkpoints import save_object


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:  # fmt: skip
    """Return the model inside of its wrappers."""
    del recursive
    return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)


def is_compiled_module(module: Any) -> bool:
    """Return whether the module is compiled."""
    return hasattr(module, "_orig_mod")


def is_peft_model(model: Any) -> bool:
    """Return whether the model, inside of its wrappers, is one of peft."""
    kinds = type(unwrap_model(model)).__mro__
    return any(
        f"{kind.__module__}.{kind.__name__}" == "peft.peft_model.PeftModel" for kind in kinds
    )


def wait_for_everyone() -> None:
    """Return when every rank has arrived."""
    syncprims.barrier("wait_for_everyone")


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write `obj` to the file `f` on rank 0, or on the first rank of each node."""
    if syncprims.is_local_main() if save_on_each_node else syncprims.is_main():
        save_object(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return what is in a file of torch. No code in it is run."""
    kwargs["weights_only"] = True
    return torch.load(f, map_location=map_location, **kwargs)


@contextlib.contextmanager
def patch_environment(**variables: Any) -> Generator[None]:
    """In this block the environment has these variables, in upper case."""
    before = {name.upper(): os.environ.get(name.upper()) for name in variables}
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def str_to_bool(value: str) -> int:
    """Return 1 or 0 for words such as yes and no.

    :raises ValueError: for other words.
    """
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return 1
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return 0
    raise ValueError(f"{value!r} is neither yes nor no")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's bar; unless `main_process_only` is False, on the first rank of each node.

    :raises ValueError: if the first argument is a bool, as in old scripts.
    """
    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]}, ...): write it as main_process_only={args[0]}")
    if not main_process_only:
        from tqdm.auto import tqdm as bar

        return bar(*args, **kwargs)
    kwargs |= dict(zip(("iterable", "desc", "total", "leave"), args, strict=False))
    return syncprims.progress(local=True, **kwargs)
