"""Torch's own tests of c10d, ``torch.testing._internal.distributed.distributed_test``.

They are made for processes that each of them spawns; here, forked ranks of one world run one.
"""

from __future__ import annotations

import os
import shutil
import unittest
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.process_groups import dist

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 3
#: Why some of the tests cannot pass, or say nothing about this backend.
EXCLUDED = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_new_subgroups_with_group_param": "needs four ranks",
    "test_barrier_timeout_full_group": "asserts the text of Gloo's errors",
    "test_barrier_timeout_global": "asserts the text of Gloo's errors",
    "test_barrier_timeout_group": "asserts the text of Gloo's errors",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": "leaves ranks at different calls",
    "test_ddp_logging_data_cpu": "asserts that the group's C++ class is Gloo's",
    "test_monitored_barrier_gloo": "asserts the text of Gloo's errors",
    "test_monitored_barrier_gloo_rank_0_timeout": "asserts the text of Gloo's errors",
    "test_monitored_barrier_gloo_subgroup": "asserts the text of Gloo's errors",
    "test_monitored_barrier_wait_all_ranks": "asserts the text of Gloo's errors",
}


def load(backend: str, folder: Path) -> type[Any]:
    """Return the class with all tests, for ranks that ask for `backend`.

    Torch's module reads the environment when it is imported: call this in a rank.
    """
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True, parents=True)
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(RANKS), "TEMP_DIR": str(folder)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.distributed import distributed_test as suite

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            """Make no files and start no processes."""

        tearDown = setUp

        def _barrier(self, *args: Any, **options: Any) -> None:
            if dist.is_initialized():
                dist.barrier()

    return Tests
