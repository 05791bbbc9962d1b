"""What Accelerate has and this package does not offer: the errors, which name alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

_DEVICE_MAP = "load_checkpoint_in_model(model, checkpoint, device_map=...)"
#: Alternatives, by parts of the names that are not offered, without ``_``, in lower case.
_INSTEAD = {
    "deepspeed": "wrap the model by DeepSpeed itself before prepare(), or use torch's fully_shard",
    "fsdp fullysharded": "apply torch's fully_shard() to the model before prepare()",
    "megatron": "use Megatron-LM itself",
    "tensorparallel torchtp": "apply torch's parallelize_module() to the model before prepare()",
    "parallelism contextparallel pipelineparallel dataparallel": (
        "wrap the model with torch's own means before prepare()"
    ),
    "dynamo repeatedblocks": "call torch.compile(model) before or after prepare()",
    "fp8 recipe": "use mixed_precision='bf16'",
    "nativeamp mixedprecision": "give mixed_precision= to the Accelerator",
    "communicationhook commhook commwrapper commstate": (
        "call register_comm_hook() of a prepared model that is in DDP"
    ),
    "dispatchbatches": "give DataLoaderConfiguration(dispatch_batches=...) to the Accelerator",
    "devicemap maxmemory maxlayer balancedmemory dispatch hooktomodule hookfrommodule alignd"
    " devicesame totalbuffer moduleleaves withties fallback": _DEVICE_MAP,
    "xla downcast": "syncprims does not run on TPUs",
    "debugmode": "leave it out: calls of all ranks always compare shapes, dtypes and structures",
    "defaultdevice setdevice": "use `device`, which is set",
    "cpuaffinity": "bind each rank itself, by os.sched_setaffinity()",
    "offload": "leave it out: load_checkpoint_in_model() reads weights straight into the model",
    "dummy": "make an optimizer and a schedule of torch",
    "tracker loggertype": "Accelerator(log_with=...) takes any object with log(values, step=...)",
    "quantiz bnb": "quantize the model by bitsandbytes itself before prepare()",
    "lomo": "step the optimizer yourself",
    "basicconfig": "leave it out: there is no file of options",
    "pippy buildpipeline": "use torch.distributed.pipelining",
    "profile": "use torch.profiler.profile() itself",
    "localsgd": "step in no_sync(model), and all_reduce() the parameters every few steps",
    "hook": "use register_forward_hook() and its kin of the module itself",
    "customstate acceleratorstate": "call save_state() and load_state() of the Accelerator",
    "skipdataloader skipbatch": "call skip_first_batches(loader, count)",
    "shard dataloaderstate dataloaderadapter": "prepare() the loader: each rank then gets its part",
    "setmoduletensor": _DEVICE_MAP,
    "rngtype synchronizerng": "call synchronize_rng_states() where ranks draw the same numbers",
    "keepinfp32": "cast parts of the model first, without dtype=: each keeps its own",
    "fullstatedict": "leave it out: tensors spread over ranks are cut from whole ones",
    "broadcastfromrank0": "leave it out: every rank reads for itself",
    "testutils": "import it from accelerate.test_utils, whose code it is",
    "commands": "use `syncprims run` and `syncprims env`",
    "initmethod": "leave it out: the launcher says where the ranks meet",
    "backend": "choose it by SYNCPRIMS_BACKEND, or by `syncprims run --backend`",
}
#: Parts of names of small functions and of files that serve Accelerate itself.
_INTERNALS = (
    "tensor torch convert prepare parse module model param layer operat info dict env sagem weights"
    " trainstep dtype kernel recurs version compil regions enum init affinity precision scaler name"
    " shape size buffers port habana find launch honor listify concat device struct optimizer p2p"
    " nothing sampler globals types dataset logger"
)
#: Endings of the variables that ask for these.
_VARIABLES = """USE_FSDP USE_DEEPSPEED USE_MEGATRON_LM USE_PARALLELISM_CONFIG DYNAMO_BACKEND
    DEBUG_MODE DOWNCAST_BF16 CPU_AFFINITY"""


def _is_in(parts: str, name: str) -> bool:
    return any(part in name.lower().replace("_", "") for part in parts.split())


def instead_of(name: str) -> str:
    """Return what to do in place of what has this name in Accelerate; empty for other names."""
    return next((way for parts, way in _INSTEAD.items() if _is_in(parts, name)), "")


class _NotOffered(type):
    """Makes a class that can be imported and asked about, but neither called nor read."""

    _prepared: type | tuple[()]  #: whose objects are its instances
    _instead: str  #: what to use in its place

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._prepared)

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        what = f"{cls.__module__}.{cls.__name__} is not offered"
        raise NotImplementedError(f"{what}; {cls._instead}")

    __getitem__ = __iter__ = __contains__ = __call__  # of lists and dicts

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        cls.__call__()


def not_offered(module: str, name: str, prepared: type | tuple[()] = ()) -> type:
    """Return a stand-in for a name of Accelerate's that is not offered; using it raises an error.

    Programs import such names at their top, and use them only where the user asks for it. Objects
    of `prepared` count as its instances.

    :raises AttributeError: if Accelerate has no such name, as far as is known here.
    """
    instead = instead_of(name) or instead_of(module.rpartition(".accelerate")[2])
    if not instead and _is_in(_INTERNALS, name):
        instead = "import it from accelerate.utils, whose code it is"
    if name.startswith("__") or not instead:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _NotOffered(name, (), {"__module__": module, "_prepared": prepared, "_instead": instead})


def check_fixed(fixed: object, value: object, call: str, instead: str) -> None:
    """Check that `value` is None, or the only value that is supported.

    :raises TypeError: otherwise, saying what to do instead.
    """
    if value is not None and value != fixed:
        raise TypeError(f"{call} is not offered; {instead}")


def check_unsupported(call: str, arguments: Mapping[str, object]) -> None:
    """Check that arguments without an equivalent ask for nothing: None, False, "no" or empty.

    :raises TypeError: otherwise; for an argument of Accelerate's it says what to do instead.
    """
    for name, value in arguments.items():
        instead = instead_of(name)
        if not instead:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        value = getattr(value, "backend", value)  # of a TorchDynamoPlugin
        asks = None if getattr(value, "value", value) in ("no", "NO", {}) else value
        check_fixed(name == "full_state_dict", asks, f"{call}({name}=)", instead)


def check_variables(environ: Mapping[str, str]) -> None:
    """Check that no variable of ``accelerate launch`` asks for what is not offered.

    :raises TypeError: as for the argument that asks for the same, naming the variable.
    """
    for name in (f"ACCELERATE_{ending}" for ending in _VARIABLES.split()):
        if (value := environ.get(name, "")).lower() not in ("", "no", "false", "off", "0"):
            check_fixed(None, value, f"{name}={value}", instead_of(name))
