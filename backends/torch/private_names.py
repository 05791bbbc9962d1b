"""Private names of torch that this backend reads."""

from __future__ import annotations

from syncprims._system.upstream import PrivateNames

_ENDS = "ends groups without waiting for lost ranks"

NAMES = PrivateNames(
    "backends.torch",
    {
        "torch._C._distributed_c10d": {
            "ProcessGroupGloo._Options": "chooses the network of Gloo",
            "ProcessGroupGloo._Options._devices": "chooses the network of Gloo",
            "ProcessGroupGloo._Options._timeout": "limits the time to connect",
            "ProcessGroupGloo._set_default_timeout": "lets transfers take their time",
        },
        "torch.distributed.distributed_c10d": {
            "ProcessGroup._device_types": _ENDS,
            "ProcessGroup._get_backend": _ENDS,
            "_abort_process_group": _ENDS,
            "_get_default_store": "meets where a program's own group has met",
            "_world": _ENDS,
        },
    },
)
