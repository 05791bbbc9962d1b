"""Torch's own tests of c10d, ``torch.testing._internal.distributed.distributed_test``.

They are made for processes that each of them spawns; here, forked ranks of one world run one.
"""

from __future__ import annotations

import os
import unittest
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import syncprims as sp
from support.process_groups import dist, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 3
#: Why some of the tests cannot pass, or say nothing about this backend.
EXCLUDED = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_new_subgroups_with_group_param": "needs four ranks",
    "test_barrier_timeout_full_group": "asserts the text of Gloo's errors",
    "test_barrier_timeout_global": "asserts the text of Gloo's errors",
    "test_barrier_timeout_group": "asserts the text of Gloo's errors",
    "test_monitored_barrier_gloo": "asserts the text of Gloo's errors",
    "test_monitored_barrier_gloo_rank_0_timeout": "asserts the text of Gloo's errors",
    "test_monitored_barrier_gloo_subgroup": "asserts the text of Gloo's errors",
    "test_monitored_barrier_wait_all_ranks": "asserts the text of Gloo's errors",
}

#: The same, where the tests ask for `gloo` and are served.
EXCLUDED_IF_SERVED = {
    "test_ddp_logging_data_cpu": "DDP's logger asks the group for its own name, which is ours",
}

#: The ones that run every day: one of each kind.
SAMPLE = (
    "test_all_gather_coalesced_complex",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_sum_async",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_isend_autograd_profiler",
    "test_reduce_full_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
)


def run_tests(names: Sequence[str], backend: str, folder: Path) -> list[str]:
    """Run tests as a rank of a world of three, and return which of them were skipped.

    `backend` is what the tests ask for. Its own name apart, it is served under that one.
    """
    for sub in ("barrier", "test_dir", "init_dir"):
        (folder / sub).mkdir(exist_ok=True, parents=True)
    # Torch's module reads them when it is imported.
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(RANKS), "TEMP_DIR": str(folder)}
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test as suite

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            """Make no files, and start no processes."""

        tearDown = setUp

        def _barrier(self, *args: Any, **options: Any) -> None:
            if dist.is_initialized():
                dist.barrier()

    skips = {skip.exit_code for skip in TEST_SKIPS.values()}
    if backend != "syncprims":
        from syncprims.c10d.torch_internals import replace_group_maker

        replace_group_maker()  # for as long as this process lives

    def run(name: str) -> bool:
        test: Any = Tests(name)
        method: Any = getattr(test, name)
        if getattr(method, "__unittest_skip__", False):
            return False
        test.rank, test.file_name = sp.get_rank(), str(folder / f"store-{name}")
        limit = seconds(suite.CUSTOM_PG_TIMEOUT.get(name, 100))
        dist.init_process_group(
            backend,
            init_method=f"file://{test.file_name}",
            rank=test.rank,
            world_size=RANKS,
            timeout=limit,
        )
        dist.barrier()
        ran = True
        try:
            method()
        except unittest.SkipTest:
            ran = False
        except SystemExit as end:
            if end.code not in skips:
                raise
            ran = False
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return ran

    return [name for name in names if not run(name)]
