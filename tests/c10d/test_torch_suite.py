"""Torch's own tests of c10d: under the name of this backend, and served as ``gloo``."""

from __future__ import annotations

import contextlib
import os
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import soak
from support import process_groups as process_groups  # imports torch before ranks fork
from support.process_groups import dist, seconds
from support.rank_worlds import Kind, Ranks

import syncprims as sp

RANKS = 3
_serving = contextlib.ExitStack()  # never closed: for as long as a rank's process lives
#: Why some of the tests cannot pass, or say nothing about this backend.
EXCLUDED = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_new_subgroups_with_group_param": "needs four ranks",
    "test_send_recv_any_source": "needs receives from any rank, as Gloo has",
    "test_send_recv_any_source_autograd_profiler": "needs receives from any rank",
    "test_send_recv_any_source_torch_profiler": "needs receives from any rank",
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
    "test_ddp_logging_data_cpu": "DDP's logger asks the group for its own name, which is ours"
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
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
)


def run_tests(part: slice | None, backend: str, folder: Path) -> list[str]:
    """Run tests as a rank of a world of three, and return which of them were skipped.

    `part` of all tests is run, or the sample of every day.
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
        from syncprims.c10d.torch_internals import serve_every_backend

        _serving.enter_context(serve_every_backend())

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

    names = SAMPLE if part is None else _all_names(Tests, backend)[part]
    return [name for name in names if not run(name)]


def _all_names(tests: type, backend: str) -> list[str]:
    """Return the names of all tests that can pass; which ones torch has depends on the system."""
    excluded = {*EXCLUDED} if backend == "syncprims" else {*EXCLUDED, *EXCLUDED_IF_SERVED}
    return [name for name in dir(tests) if name.startswith("test_") and name not in excluded]


_CHUNKS = 12


@pytest.mark.parametrize("backend", ["syncprims", "gloo"])
@pytest.mark.parametrize("chunk", [None, *map(soak, range(_CHUNKS))])
def test_torch_suite(chunk: int | None, backend: str, meeting_place: Path, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    part = None if chunk is None else slice(chunk, None, _CHUNKS)
    world = Ranks(Kind("file", RANKS), meeting_place, patience=600.0)
    skipped = world.run(lambda: run_tests(part, backend, tmp_path))
    world.check_nothing_left()
    assert chunk is not None or backend == "syncprims" or not any(skipped)
