"""Private names of torch that this backend reads."""

from __future__ import annotations

from syncprims._system.upstream import PrivateNames

_OPTIONS = "ProcessGroupGloo._Options"
_OF_GROUPS = "ProcessGroup._device_types ProcessGroup._get_backend"
_ENDS = "ends groups without waiting for lost ranks"

NAMES = PrivateNames(
    "backends.torch",
    {
        "torch._C._distributed_c10d": {
            f"{_OPTIONS} {_OPTIONS}._devices": "chooses the network of Gloo",
            f"{_OPTIONS}._timeout ProcessGroupGloo._set_default_timeout": "limits times of Gloo",
            _OF_GROUPS: _ENDS,
        },
        "torch.distributed.distributed_c10d": {
            "_abort_process_group _world": _ENDS,
            "_get_default_store": "meets where a program's own group has met",
        },
    },
)
