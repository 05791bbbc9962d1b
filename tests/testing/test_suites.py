"""``--syncprims-worlds``: other suites, unchanged, whose process groups are worlds."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

#: The same tests pass, fail and are skipped with its own launchers, and take several times as long.
SUITE = """
import os
import signal
import subprocess
import sys
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import spawn


def total():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return int(tensor)


def worker(rank, ranks, url, bad=None):
    assert "LOCAL_RANK" not in os.environ  # torchrun sets it, and these launchers do not
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=url)
    assert total() == ranks
    if rank == bad:
        raise ValueError("a bad rank")
    if bad == "exit":
        sys.exit(3)
    dist.destroy_process_group()


def test_spawn(tmp_path):
    spawn(worker, args=(3, f"file://{tmp_path}/store"), nprocs=3)
    mp.start_processes(worker, (2, f"file://{tmp_path}/other"), 2, start_method="fork")


def test_what_a_rank_raises(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="ValueError: a bad rank") as caught:
        mp.spawn(worker, args=(2, f"file://{tmp_path}/store", 1), nprocs=2)
    assert caught.value.error_index == 1
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(worker, args=(2, f"file://{tmp_path}/other", "exit"), nprocs=2)
    assert caught.value.exit_code == 3


def test_joined_later(tmp_path):
    context = mp.spawn(worker, (1, f"file://{tmp_path}/store"), nprocs=1, join=False)
    while not context.join():
        pass
    assert context.join()  # again


class Counter:
    calls = 0


def count(rank, counter, queue):
    counter.calls += 1  # of this rank's own copy
    queue.put((rank, counter.calls))


def learn(rank, model):
    assert model[0].weight.is_shared() and model[0].weight is model[1].weight
    assert model[0].weight.grad is None
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model[0].bias[rank] = rank + 1.0


def test_ranks_share_the_memory_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    mp.spawn(learn, (model,), nprocs=2)
    assert model[0].bias.tolist() == [1, 2]
    assert model[0].weight.grad is None


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_have_copies(method):
    queue, counter = mp.get_context(method).SimpleQueue(), Counter()
    mp.start_processes(count, (counter, queue), 2, start_method=method)
    assert sorted(queue.get() for _ in range(2)) == [(0, 1), (1, 1)]
    assert counter.calls == 0


def entry(factor):
    assert "LOCAL_RANK" in os.environ
    dist.init_process_group("gloo")
    result = total(), dist.get_rank() * factor
    dist.destroy_process_group()
    if factor == 0:
        raise ValueError("no factor")
    return result


def test_elastic_launch():
    options = dict(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d",
                   rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert elastic_launch(LaunchConfig(**options), entry)(5) == {0: (2, 0), 1: (2, 5)}
        with pytest.raises(dist.elastic.multiprocessing.errors.ChildFailedError):
            elastic_launch(LaunchConfig(**options), entry)(0)
    finally:
        # torch leaves its handler here. A later pool's worker that has it does not end by a signal
        # that comes just before it waits for work.
        signal.signal(signal.SIGTERM, before)


def main():
    dist.init_process_group("gloo")
    print(f"{total()} ranks", end=" ", flush=True)
    dist.destroy_process_group()


def test_a_command(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import test_suite; test_suite.main()")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    variables = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([*command, script], env=variables, capture_output=True)
    assert done.stdout.count(b"2 ranks") == 2, done.stderr


def begin(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=URL)


def add(rank, number):
    return total() + rank + number


def test_pool(tmp_path):
    global URL
    URL = f"file://{tmp_path}/store"
    with mp.get_context("fork").Pool(2) as pool, mp.get_context("fork").Pool(2) as other:
        pool.map(begin, range(2))
        assert pool.starmap(add, [(0, 10), (1, 10)]) == [12, 13]  # the group is still open
        assert other.map(abs, [-1, -2]) == [1, 2] and other.map(abs, range(3)) == [0, 1, 2]


def set_up(lines):
    with open(lines, "a") as file:
        print("set up", file=file)


def write(lines):
    with open(lines, "a") as file:
        print("called", file=file)


def test_pool_without_a_group(tmp_path):
    path = tmp_path / "lines"
    with mp.get_context("spawn").Pool(2, initializer=set_up, initargs=(path,)) as pool:
        pool.map(write, [path, path])
    lines = path.read_text().splitlines()
    assert lines.count("called") == 2 and lines[0] == "set up"


def put_sum(queue, barrier, *args):
    worker(*args)
    barrier.wait()
    queue.put(os.getpid())


def test_processes(tmp_path):
    torch.ones(2, requires_grad=True).sum().backward()  # no process can be forked after that
    context = mp.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(2)
    processes = [
        context.Process(
            target=put_sum, args=(queue, barrier, rank, 2, f"file://{tmp_path}/store")
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert {queue.get() for _ in range(2)} == {process.pid for process in processes}
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def spawn_another(queue):
    put, get = queue.put, queue.get
    for function, *args in ((put, 0), (get,), (sys.exit, 0), (put, os.getpid())):
        process = mp.get_context("spawn").Process(target=function, args=args)
        process.start()
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_a_process(method):
    queue = mp.get_context("spawn").SimpleQueue()
    process = mp.get_context(method).Process(target=spawn_another, args=(queue,))
    process.start()
    process.join()
    assert process.exitcode == 0 and queue.get() == process.pid


VALUE = "as imported"


def read_state(rank, queue):
    queue.put((VALUE, os.environ["OF_THE_TEST"], os.getcwd()))


def test_a_spawned_process_begins_as_after_the_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "VALUE", "patched")
    monkeypatch.setenv("OF_THE_TEST", "set")
    monkeypatch.chdir(tmp_path)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(read_state, (queue,), nprocs=1)
    assert queue.get() == ("as imported", "set", str(tmp_path))


def say(rank):
    print("a word of rank", rank)


def test_output(capfd):
    mp.spawn(say, (), nprocs=1)
    assert "a word of rank 0" in capfd.readouterr().out


def call_fake(rank):
    from torch.testing._internal.distributed import fake_pg  # registers it

    dist.init_process_group("fake", rank=rank, world_size=2, store=dist.HashStore())
    total()


def test_a_backend_of_its_own():
    mp.spawn(call_fake, (), nprocs=2, join=False).join()


try:
    from torch.testing._internal import common_distributed as base
except ImportError:  # its own needs are not installed
    pass
else:

    class TestProcesses(base.MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_sum(self):
            store = dist.FileStore(self.file_name, 2)
            dist.init_process_group("gloo", rank=self.rank, world_size=2, store=store)
            self.assertEqual(total(), 2)

        @base.skip_if_lt_x_gpu(8)
        def test_skipped(self):
            assert False

        @unittest.expectedFailure
        def test_wrong(self):
            self.assertEqual(self.rank, 5)

    class TestNoProcesses(TestProcesses):
        world_size = 0

        def test_sum(self):
            assert False  # no rank runs it

        test_skipped = test_wrong = None

    class TestGroupBefore(base.MultiProcessTestCase):  # as torch's own suites of DDP and FSDP
        world_size = "2"  # from a variable of the environment
        destroy_pg_upon_exit = False

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        @classmethod
        def _run(cls, rank, test_name, file_name, pipe, **kwargs):
            self = cls(test_name)
            self.rank, self.file_name = rank, file_name
            store = dist.FileStore(file_name, 2)
            dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
            self.run_test(test_name, pipe)
            dist.destroy_process_group()

        def test_sum(self):
            self.assertEqual(total(), 2)

    class TestThreads(base.MultiThreadedTestCase):
        world_size = 3

        def setUp(self):
            super().setUp()
            self._spawn_threads()

        def test_sum(self):
            self.assertEqual(total(), 3)

    if hasattr(base, "MultiProcContinuousTest"):

        class TestContinuous(base.MultiProcContinuousTest):
            world_size = 2

            @classmethod
            def backend_str(cls):
                return "gloo"

            @classmethod
            def device_type(cls):
                return "cpu"

            def test_sum(self):
                self.assertEqual(total(), 2)

            def test_not_here(self):
                sys.exit(base.TEST_SKIPS["no_cuda"].exit_code)

            @unittest.expectedFailure
            def test_wrong(self):
                self.assertEqual(self.rank, type(self).rank + 1)
"""


def run_pytest(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore"]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]  # a base skips what follows a failure
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV", "CI"))}
    done = subprocess.run(
        [*command, *options], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def outcomes(passed: int, others: str = "") -> str:
    """Return what the summary says where so many tests pass that need no base class of torch."""
    if not find_spec("expecttest"):
        return f"{passed} passed{others} in"
    if has_continuous_test():
        return f"{passed + 5} passed, 2 skipped{others}, 2 xfailed in"
    return f"{passed + 4} passed, 1 skipped{others}, 1 xfailed in"


def has_continuous_test() -> bool:
    bases = Path(torch.__file__).parent / "testing/_internal/common_distributed.py"
    has = "class MultiProcContinuousTest" in bases.read_text()  # not with torch 2.6
    return has and find_spec("expecttest") is not None


def test_a_suite_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    out = run_pytest(tmp_path, "--syncprims-worlds")
    assert outcomes(16) in out, out
    assert "13 process groups in worlds of processes" in out, out
    assert "1 left to torch: a group of the backend fake" in out


EARLY = """
import atexit
import multiprocessing

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp


def join(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)


def pytest_sessionstart(session):
    atexit.register(lambda: print(len(multiprocessing.active_children()), "still run"))
    pytest.pool = mp.get_context("spawn").Pool(2)
    pytest.pool.starmap(join, [(rank, session.startpath) for rank in range(2)], chunksize=1)
"""
USES_EARLY = """
import atexit
import multiprocessing

import pytest
import torch.distributed as dist


def gathered(rank):
    values = [None, None]
    dist.all_gather_object(values, rank)
    return values


def test_pool():
    assert pytest.pool.map(gathered, range(2), chunksize=1) in ([[0, 1]] * 2, [[1, 0]] * 2)
"""


def test_processes_that_a_suite_starts_before_its_tests_are_served(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(EARLY)
    (tmp_path / "test_pool.py").write_text(USES_EARLY)
    out = run_pytest(tmp_path, "--syncprims-worlds")
    assert "1 passed" in out, out
    assert "1 process groups in worlds of processes" in out, out
    assert "2 still run" in out, out  # nobody has closed the pool, which sees them after the tests


BUGS = """
import os
import signal
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def make_group(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    if rank:
        dist.new_group([0, 1])
    dist.barrier()


def test_group(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    with pytest.raises(mp.ProcessRaisedException, match="rank 1: new_group"):
        mp.spawn(make_group, (f"file://{tmp_path}/store",), nprocs=2)


def make_groups(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    dist.new_group([0, 1] if rank else [0])


def test_members(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="unlike groups"):
        mp.spawn(make_groups, (f"file://{tmp_path}/store",), nprocs=2)


def make_for_both(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    if rank:
        dist.new_group([0, 1])
    dist.barrier()


def test_one_makes_a_group_of_both(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="rank 1: new_group .test_bugs.py"):
        mp.spawn(make_for_both, (f"file://{tmp_path}/store",), nprocs=2)


def skip(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    if not rank:
        dist.barrier()


def test_a_skipped_barrier(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match=r"rank 1 finished.* barrier"):
        mp.spawn(skip, (f"file://{tmp_path}/store",), nprocs=2)


def call_wrongly(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match="root 5 is not a rank"):
        dist.broadcast(torch.ones(1), src=5)


def test_an_invalid_call(tmp_path):
    mp.spawn(call_wrongly, (f"file://{tmp_path}/store",), nprocs=2)


def call_what_gloo_refuses(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    with pytest.raises(ValueError, match="Gloo refuses sum of int16"):
        dist.all_reduce(torch.ones(1, dtype=torch.int16))


def test_a_call_that_gloo_refuses(tmp_path):
    mp.spawn(call_what_gloo_refuses, (f"file://{tmp_path}/store",), nprocs=2)


class Code:
    def __bool__(self):
        raise TypeError("neither true nor false")


def exit_with_a_code_of_its_own(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    try:
        raise ValueError("a bad rank")
    except ValueError:
        sys.exit(Code())


def test_an_exit_with_a_code_of_its_own(tmp_path):
    with pytest.raises(mp.ProcessExitedException, match="exit code 1"):
        mp.spawn(exit_with_a_code_of_its_own, (f"file://{tmp_path}/store",), nprocs=2)


def be_killed(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    dist.barrier()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank(tmp_path):
    with pytest.raises(mp.ProcessExitedException, match="process 1 .* SIGKILL"):
        mp.spawn(be_killed, (f"file://{tmp_path}/store",), nprocs=2)


def come_alone(rank, url):
    with pytest.raises(RuntimeError, match="did not come"):
        dist.init_process_group(
            "gloo", url, rank=rank, world_size=2, timeout=timedelta(seconds=0.5)
        )


def test_a_rank_never_comes(tmp_path):
    mp.spawn(come_alone, (f"file://{tmp_path}/store",), nprocs=1)
"""


def test_bugs_of_a_suite_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_bugs.py").write_text(BUGS)
    out = run_pytest(tmp_path, "--syncprims-worlds")
    assert "9 passed" in out, out


HABITS = """
import os
import signal
import socket
import time
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

torch.manual_seed(3)
SPAWN = mp.get_context("spawn")


def draw(rank, queue):
    warnings.warn("seen by nobody")
    queue.put((torch.rand(1).item(), numpy.random.rand()))


def test_random_numbers_and_warnings_are_those_of_a_new_process():
    queue = SPAWN.SimpleQueue()
    mp.spawn(draw, (queue,), nprocs=2)
    (seeded, own), (also_seeded, another) = queue.get(), queue.get()
    assert seeded == also_seeded and own != another


def meet_often(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    for _ in range(20):
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()


def test_groups_one_after_another_have_one_port():
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    mp.spawn(meet_often, (port,), nprocs=2)


def add(rank, url):
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()


def test_the_process_of_pytest_is_a_rank(tmp_path):
    other = SPAWN.Process(target=add, args=(1, f"file://{tmp_path}/store"))
    other.start()
    add(0, f"file://{tmp_path}/store")
    other.join()
    assert other.exitcode == 0


def wait(path):
    path.write_text(str(os.getpid()))
    signal.pause()


def test_a_process_is_left(request):
    path = request.config.rootpath / "left"
    SPAWN.Process(target=wait, args=(path,), daemon=True).start()
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
"""


SEEDS_NOTHING = """
import numpy
import other_helper
import torch
import torch.multiprocessing as mp


def draw(rank, queue):
    numbers = torch.rand(1).item(), numpy.random.rand(), torch.rand(1).dtype is torch.float32
    queue.put(numbers)


def test_its_processes_have_no_seed_of_another_module():
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(draw, (queue,), nprocs=2)
    (one, another, plain), (other, different, _) = queue.get(), queue.get()
    assert one != other and another != different and plain
"""
SEEDS_BY_HELPER = """
import helper
import numpy
import random
import torch.multiprocessing as mp


def draw(rank, queue):
    queue.put((numpy.random.rand(), random.random()))


def test_its_processes_have_the_seed_of_what_it_imports():
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(draw, (queue,), nprocs=2)
    assert queue.get() == queue.get()
"""


def test_each_process_has_the_seeds_of_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import numpy, torch; torch.manual_seed(3)" + SEEDS_NOTHING)
    (tmp_path / "test_b.py").write_text(SEEDS_NOTHING)
    (tmp_path / "test_c.py").write_text(SEEDS_BY_HELPER)
    (tmp_path / "helper.py").write_text(
        "import numpy, random, torch\n"
        "numpy.random.seed(5); random.seed(5); torch.set_default_dtype(torch.float64)"
    )
    (tmp_path / "other_helper.py").write_text("")
    out = run_pytest(tmp_path, "--syncprims-worlds")
    assert "1 failed, 2 passed" in out, out
    assert "FAILED test_a.py" in out, out  # that one has a seed


def test_habits_of_suites(tmp_path: Path) -> None:
    (tmp_path / "test_habits.py").write_text(HABITS)
    out = run_pytest(tmp_path, "--syncprims-worlds", "-W", "error:seen by nobody")
    assert "4 passed" in out, out
    assert "21 process groups in worlds of processes" in out
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "left").read_text()), 0)


KILLS_ALL = """
import os
import signal

import torch.multiprocessing as mp


def come(queue):
    queue.put(os.getppid())


def start():
    queue = mp.get_context("spawn").SimpleQueue()
    process = mp.get_context("spawn").Process(target=come, args=(queue,))
    process.start()
    parent = queue.get()
    process.join()
    return parent


def test_kill_all():
    parent = start()  # a suite that kills all processes below its own finds this one
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert start() == os.getpid()
"""


def test_a_suite_may_kill_all_processes(tmp_path: Path) -> None:
    (tmp_path / "test_kills.py").write_text(KILLS_ALL)
    out = run_pytest(tmp_path, "--syncprims-worlds")
    assert "1 passed" in out, out


UNDER_TORCHRUN = """
import os

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def test_sum(tmp_path):
    (tmp_path / "own").touch(exist_ok=False)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == int(os.environ["WORLD_SIZE"]) == 3


def test_a_failure_of_one_rank():
    print("this is rank", dist.get_rank())
    assert dist.get_rank() != 2
    dist.barrier()


def test_a_rank_that_does_not_come():
    if dist.get_rank() != 1:
        dist.barrier()


@pytest.mark.xfail(strict=True)
def test_expected():
    assert dist.get_rank() > 5


def test_output(capsys):
    print("text")
    assert capsys.readouterr().out == "text\\n"
    pytest.skip("all has been seen")
"""


def test_a_suite_for_torchrun_runs_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(UNDER_TORCHRUN)
    out = run_pytest(tmp_path, "--syncprims-worlds-ranks=3")
    assert "2 failed, 1 passed, 1 skipped, 1 xfailed" in out, out
    assert "rank 2 of 3: raised AssertionError" in out
    assert "this is rank 2" in out
    assert "DeadlockError: ranks [0, 2] of 3 wait and can never go on; rank 1 has finished" in out


def test_a_path_may_follow_the_option(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_one(): pass")
    assert "1 passed" in run_pytest(tmp_path, "--syncprims-worlds", "tests/")
