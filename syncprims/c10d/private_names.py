"""Private names of torch that process groups read, and what test worlds keep for each rank.

Tried with torch 2.6, 2.13 and 2.15.
"""

from __future__ import annotations

from syncprims._system.upstream import OptionalName as Optional
from syncprims._system.upstream import PrivateNames

_MARKS = Optional("keeps code from the compiler", "its frames are skipped", since="2.13")
_FAKE = Optional("makes fake groups", "their class makes them", since="2.13")
_RECORDER = Optional("lets groups have no recorder", "torch attaches none", since="2.15")
_SHUTDOWN = Optional("ends groups of ours", "torch calls their shutdown()", until="2.6")
_GROUPS = "_backend _default_pg_init_method _group_count _unregister_all_process_groups _world"
_RECORD = "torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction"
_MODES = "shows calls to modes of the dispatcher"
_STATE = "keeps the state of torch for each rank"

NAMES = PrivateNames(
    "c10d",
    {
        "torch.autograd": {"_profiler_enabled _record_function_with_args_enter": "is profiled"},
        "torch.autograd.profiler": {_RECORD: "is profiled"},
        "torch._C": {"_len_torch_dispatch_stack": _MODES},
        "torch._C._distributed_c10d": {
            "FakeProcessGroup": _MODES,
            "FakeProcessGroup._create_internal": _FAKE,
            "ProcessGroup._register_backend ProcessGroup._set_default_backend": _MODES,
            "_create_work_from_future": "hands results over to C++",
            "_set_thread_isolation_mode": _STATE,
        },
        "torch._C._dynamo.eval_frame": {"_FrameAction _FrameExecStrategy": _MARKS},
        "torch._subclasses.fake_tensor": {"FakeTensor": "transfers nothing for a fake"},
        "torch.utils._python_dispatch": {"TorchDispatchMode _disable_current_modes": _MODES},
        "torch.distributed.distributed_c10d": {
            _GROUPS: _STATE,
            "_maybe_attach_flight_recorder": _RECORDER,
            "_new_process_group_helper": "makes the groups of every backend",
            "_object_to_tensor": "tells other ranks that an object cannot be pickled",
            "_shutdown_backend": _SHUTDOWN,
            "_store_based_barrier rendezvous": "lets ranks of a test world meet",
            "default_pg_nccl_timeout default_pg_timeout": "knows whether a program gives a timeout",
        },
        "torch.nn.parallel.distributed": {"DistributedDataParallel._active_ddp_module": _STATE},
        "torch.distributed.tensor._random": {"_rng_tracker": _STATE},
        "torch.distributed.tensor.parallel.loss": {
            "DTensor._op_dispatcher._custom_op_handlers": _STATE
        },
        "torch.distributed.fsdp._debug_utils": {"SimpleProfiler": _STATE},
    },
)
