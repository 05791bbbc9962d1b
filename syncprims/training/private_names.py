"""Private names of torch, transformers and multiprocessing that training reads."""

from __future__ import annotations

from syncprims._system.upstream import PrivateNames

NAMES = PrivateNames(
    "training",
    {
        "torch._C": {"_current_graph_task_id": "knows one backward pass from another"},
        "torch.autograd": {"_profiler_enabled": "leaves its mark of zero_grad() to a profiler"},
        "torch.autograd.variable": {
            "Variable._execution_engine": "averages at the end of a backward pass"
        },
        "torch.nn.parallel.distributed": {
            "DistributedDataParallel._check_reducer_finalized": "refuses steps before DDP's average"
        },
        "torch.amp.grad_scaler": {
            "GradScaler._per_optimizer_states": "forgets what a scaler knows of old gradients"
        },
        "torch.nn.modules.module": {
            "Module._load_from_state_dict": "knows models that load in a way of their own",
            "Module._load_state_dict_pre_hooks": "knows models that load in a way of their own",
            "Module._metadata": "stores the versions of the classes in a model's state",
        },
        "torch._dynamo.eval_frame": {
            "OptimizedModule._orig_mod": "finds the model in a compiled one"
        },
        "torch.distributed.tensor._utils": {
            "compute_local_shape_and_global_offset": "gives each rank its part of a DTensor"
        },
        "torch.utils.data.dataloader": {
            "DataLoader._get_iterator": "knows loaders that iterate in a way of their own",
            "DataLoader._iterator": "finds workers that persist",
            "_BaseDataLoaderIter._shared_seed": "seeds workers that persist",
            "_MultiProcessingDataLoaderIter._workers": "keeps signals of a job from workers",
            "_MultiProcessingDataLoaderIter._shutdown_workers": "ends workers with their rank",
        },
        "transformers.modeling_utils": {
            "PreTrainedModel._tied_weights_keys": "keeps the first name of a tied tensor"
        },
        "multiprocessing.process": {"BaseProcess._popen": "ends workers with their rank"},
    },
)
