"""Private names of torch, transformers and multiprocessing that training reads."""

from __future__ import annotations

from syncprims._system.upstream import PrivateNames

_WORKERS = (
    "_MultiProcessingDataLoaderIter._workers _MultiProcessingDataLoaderIter._shutdown_workers"
)
_LOADING = "Module._load_from_state_dict Module._load_state_dict_pre_hooks"

NAMES = PrivateNames(
    "training",
    {
        "torch._C": {"_current_graph_task_id": "knows one backward pass from another"},
        "torch.autograd": {"_profiler_enabled": "leaves its mark of zero_grad() to a profiler"},
        "torch.autograd.variable": {"Variable._execution_engine": "averages after a backward pass"},
        "torch.nn.parallel.distributed": {
            "DistributedDataParallel._check_reducer_finalized": "refuses steps before DDP's average"
        },
        "torch.amp.grad_scaler": {"GradScaler._per_optimizer_states": "forgets old gradients"},
        "torch.nn.modules.module": {
            _LOADING: "knows models that load in a way of their own",
            "Module._metadata": "stores the versions of the classes in a model's state",
        },
        "torch._dynamo.eval_frame": {"OptimizedModule._orig_mod": "finds compiled models"},
        "torch.distributed.tensor._utils": {
            "compute_local_shape_and_global_offset": "gives each rank its part of a DTensor"
        },
        "torch.utils.data.dataloader": {
            "DataLoader._get_iterator": "knows loaders that iterate in a way of their own",
            "DataLoader._iterator _BaseDataLoaderIter._shared_seed": "seeds workers that persist",
            _WORKERS: "ends workers with their rank, and not by signals of a job",
        },
        "transformers.modeling_utils": {"PreTrainedModel._tied_weights_keys": "names tied tensors"},
        "multiprocessing.process": {"BaseProcess._popen": "ends workers with their rank"},
    },
)
