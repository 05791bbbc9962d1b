"""Private names of torch that process groups read, and what test worlds keep for each rank.

Tried with torch 2.6, 2.13 and 2.15.
"""

from __future__ import annotations

from syncprims._system.upstream import OptionalName, PrivateNames

NAMES = PrivateNames(
    "c10d",
    {
        "torch.autograd": {
            "_profiler_enabled": "knows whether a profiler records",
            "_record_function_with_args_enter": "records shapes for a profiler",
        },
        "torch.autograd.profiler": {
            "torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction": "ends the record"
        },
        "torch._C": {"_len_torch_dispatch_stack": "knows whether a mode of the dispatcher is on"},
        "torch._C._distributed_c10d": {
            "FakeProcessGroup": "shows calls to modes of the dispatcher",
            "FakeProcessGroup._create_internal": OptionalName(
                "makes a group that transfers nothing", "the class itself makes it", since="2.13"
            ),
            "ProcessGroup._register_backend": "shows calls to modes of the dispatcher",
            "ProcessGroup._set_default_backend": "shows calls to modes of the dispatcher",
            "_create_work_from_future": "hands results over to C++",
            "_set_thread_isolation_mode": "keeps names of groups for each thread",
        },
        "torch._C._dynamo.eval_frame": {
            "_FrameAction": OptionalName("marks code", "its frames are marked", since="2.13"),
            "_FrameExecStrategy": OptionalName("marks code", "its frames are marked", since="2.13"),
        },
        "torch._subclasses.fake_tensor": {"FakeTensor": "transfers nothing for a fake"},
        "torch.utils._python_dispatch": {
            "TorchDispatchMode": "sees what modes pass on",
            "_disable_current_modes": "transfers without modes",
        },
        "torch.distributed.distributed_c10d": {
            "_backend": "keeps the default backend for each rank",
            "_default_pg_init_method": "keeps the default group for each rank",
            "_group_count": "keeps the names of groups for each rank",
            "_maybe_attach_flight_recorder": OptionalName(
                "leaves our groups without a flight recorder", "torch attaches none", since="2.15"
            ),
            "_new_process_group_helper": "makes the groups of every backend",
            "_object_to_tensor": "tells other ranks that an object cannot be pickled",
            "_shutdown_backend": OptionalName(
                "ends groups of ours", "torch calls their shutdown()", until="2.6"
            ),
            "_store_based_barrier": "lets ranks of a test world meet at a new group",
            "_unregister_all_process_groups": "forgets groups at the end of a rank",
            "_world": "keeps the groups of each rank",
            "default_pg_nccl_timeout": "knows whether a program gives a timeout",
            "default_pg_timeout": "knows whether a program gives a timeout",
            "rendezvous": "finds the store of a test world",
        },
        "torch.nn.parallel.distributed": {
            "DistributedDataParallel._active_ddp_module": "keeps the DDP in use for each rank"
        },
        "torch.distributed.tensor._random": {
            "_rng_tracker": "keeps the random numbers of DTensor for each rank"
        },
        "torch.distributed.tensor.parallel.loss": {
            "DTensor._op_dispatcher._custom_op_handlers": "keeps loss_parallel() for each rank"
        },
        "torch.distributed.fsdp._debug_utils": {
            "SimpleProfiler": "keeps what FSDP does at the moment for each rank"
        },
    },
)
