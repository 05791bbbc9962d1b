"""The public surface of the installed Accelerate, compared with ours: every difference is known."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from importlib.metadata import version
from inspect import Parameter
from typing import Any

import pytest
from conftest import on_every_rank
from support.accelerate_scripts import installed
from support.training_models import alone

from syncprims import accelerate

HERE = installed()
pytestmark = [
    pytest.mark.skipif(
        HERE is None or version("accelerate") != accelerate.__version__,
        reason="needs the version of accelerate whose names these are",
    ),
    pytest.mark.filterwarnings("ignore"),
]
#: The variables of a loop, and what is there for type checkers.
NO_NAMES = {"v", "additional_kwargs", "TYPE_CHECKING"}
CLASSES = ("Accelerator", "PartialState", "AcceleratorState", "GradientState")

#: How a call of Accelerate's function may differ here. A parameter with a bar, and all after it,
#: are given by their names only; one with a minus is not there.
CALLS = {
    "Accelerator": "|deepspeed_plugin",
    "AcceleratorState": "|mixed_precision",
    "notebook_launcher": "|use_port",
    "load_checkpoint_in_model": "|offload_state_dict strict=True",  # said in the page
    "prepare_data_loader": "|put_on_device",
    "find_batch_size": "-data",
    # `prepare` makes these, and trackers by their names.
    "AcceleratedOptimizer": "-device_placement -scaler",
    "AcceleratedScheduler": "-step_with_optimizer -split_batches",
    "GeneralTracker": "|_blank",
    # Decorators are given a function, or options of their own.
    ".on_last_process": "-function",
    ".on_local_main_process": "-function",
    ".on_main_process": "-function",
    # Accelerate's hide their parameters in a decorator.
    ".init_trackers": "-args -kwargs",
    ".log": "-args -kwargs",
    # Options of its functions that write and read pickles.
    ".load_state": "-load_model_func_kwargs",
    ".save_state": "-save_model_func_kwargs",
    ".maybe_context_parallel": "|buffers",
}
#: Public attributes that only Accelerate has.
MISSING = {
    "Accelerator": {
        "ao_recipe_handler", "context_parallel_rank", "data_parallel_rank",
        "data_parallel_shard_rank", "deepspeed_ulysses_dl_adapter", "delayed_fp8_autocast",
        "flag_tensor", "fp8_backend", "fp8_recipe_handler", "has_fp8_handler", "lomo_backward",
        "msamp_recipe_handler", "pipeline_parallel_rank", "profile", "profile_handler", "rng_types",
        "te_recipe_handler", "tensor_parallel_rank", "verify_device_map",
    },
    "PartialState": {"default_device", "set_device"},
    "AcceleratorState": {"get_deepspeed_plugin", "select_deepspeed_plugin"},
    "GradientState": set[str](),
}  # fmt: skip
#: Of these, what Accelerate keeps for itself: the error says that there is none.
OF_ITS_OWN = {"delayed_fp8_autocast", "flag_tensor"}


def modules() -> list[str]:
    """Return those that programs import. `rich` needs another package."""
    files = ("*.py", "utils/*.py", "test_utils/*.py", "commands/__init__.py", "commands/launch.py")
    paths = [path for one in files for path in HERE.glob(one)] if HERE else []
    parts = [("accelerate", *path.relative_to(HERE or "").with_suffix("").parts) for path in paths]
    names = [".".join(some).removesuffix(".__init__") for some in parts if some[-1] != "rich"]
    return sorted(names)


MODULES = modules()


def public_names(module: str) -> dict[str, Any]:
    """Return what a module of Accelerate defines, or has from another of its modules."""
    return {
        name: thing
        for name, thing in vars(importlib.import_module(module)).items()
        if (getattr(thing, "__module__", None) or module).startswith("accelerate")
        and not (name.startswith("_") or inspect.ismodule(thing) or name in NO_NAMES)
    }


def ours(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"syncprims.{module}"), name)


def is_offered(thing: object) -> bool:
    return type(thing) is not type(accelerate.DeepSpeedPlugin)


def difference(theirs: Any, mine: Any) -> str:
    """Return what the parameters of Accelerate's function differ in from ours, as in `CALLS`."""
    there, here = (
        [p for p in inspect.signature(f).parameters.values() if p.name != "self"]
        for f in (theirs, mine)
    )
    given = {p.name: p for p in here}
    kinds = {p.kind for p in here}
    positional = {Parameter.POSITIONAL_OR_KEYWORD}
    if Parameter.VAR_POSITIONAL in kinds:
        positional.clear()
    order = [p.name for p in here if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    found: list[str] = []
    for at, p in enumerate(there):
        if p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            known = p.kind in kinds
        else:
            known = p.name in given or Parameter.VAR_KEYWORD in kinds
        if not known:
            found.append(f"-{p.name}")
        elif order[at : at + 1] != [p.name] and p.kind in positional and "|" not in "".join(found):
            found.append(f"|{p.name}")
        wanted = getattr(p.default, "value", p.default)  # of an enumeration
        default = given[p.name].default if p.name in given else wanted
        # An object of no kind says that nothing is given.
        if wanted is not Parameter.empty and type(wanted) is not object and default != wanted:
            found.append(f"{p.name}={default!r}")
    return " ".join(found)


@pytest.mark.parametrize("module", MODULES)
def test_a_name_is_offered_or_says_what_to_do(module: str) -> None:
    for name in public_names(module):
        found = ours(module, name)
        if not is_offered(found):
            for use in (found, iter, lambda thing: thing["key"], lambda thing: thing.attribute):
                with pytest.raises(NotImplementedError, match=rf"{name} is not offered; \w+"):
                    use(found)


def test_a_call_has_accelerates_parameters() -> None:
    calls = {
        name: (thing, ours(module, name))
        for module in reversed(MODULES)  # outer modules win, where two have a name
        for name, thing in public_names(module).items()
    }
    for kind in CLASSES:
        theirs, mine = calls[kind]
        calls |= {
            f".{name}": (method, getattr(mine, name))
            for name, method in inspect.getmembers(theirs, inspect.isroutine)
            if not name.startswith("_") and name not in MISSING[kind]
        }
    found = {
        name: difference(theirs, mine)
        for name, (theirs, mine) in calls.items()
        if is_offered(mine) and callable(theirs) and not is_without_parameters(theirs)
    }
    assert {name: text for name, text in found.items() if text} == CALLS


def is_without_parameters(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, (Enum, BaseException))


@alone
@on_every_rank
def test_an_object_has_accelerates_attributes() -> None:
    theirs = importlib.import_module("accelerate").Accelerator(cpu=True)
    mine = accelerate.Accelerator(cpu=True)
    assert str(mine.state) == str(theirs.state)
    pairs: list[tuple[Any, Any]] = [
        (theirs, mine),
        (importlib.import_module("accelerate").PartialState(), accelerate.PartialState()),
        (theirs.state, mine.state),
        (theirs.gradient_state, mine.gradient_state),
    ]
    for kind, (there, here) in zip(CLASSES, pairs, strict=True):
        missing = {name for name in dir(there) if not name.startswith("_")} - set(dir(here))
        assert missing == MISSING[kind], kind
        for name in missing - OF_ITS_OWN:
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'; .+"):
                getattr(here, name)


@alone
@on_every_rank
def test_accelerates_own_options_are_checked() -> None:
    theirs: Any = importlib.import_module("accelerate.utils")
    hook = theirs.DDPCommunicationHookType.FP16
    for handler, said in (
        (theirs.InitProcessGroupKwargs(backend="gloo"), "SYNCPRIMS_BACKEND"),
        (theirs.DistributedDataParallelKwargs(comm_hook=hook), "register_comm_hook"),
        (theirs.ProfileKwargs(), "torch.profiler"),
    ):
        with pytest.raises(TypeError, match=f"is not offered; .*{said}"):
            accelerate.Accelerator(cpu=True, kwargs_handlers=[handler])
    taken = [theirs.GradScalerKwargs(init_scale=4.0), theirs.DistributedDataParallelKwargs()]
    job = accelerate.Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=taken)
    assert job.scaler is not None
    assert (job.scaler.get_scale(), job.preparation.ddp_options) == (4.0, {})
