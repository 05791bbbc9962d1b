"""The pytest plugin, in separate pytest sessions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import both_kinds
from support import ROOT
from support.pages import tables

from syncprims.errors import install

BUGGY = """
    import pytest, sys
    import syncprims as sp

    @pytest.mark.world(ranks=3)
    def test_skipped():
        sp.barrier("start")
        print("said by", sp.get_rank())
        print("complained", file=sys.stderr)
        if sp.is_main():
            sp.barrier("loaded")
"""

HOW = f"Install it: {install('torch')}"
ARGUMENTS = "ranks, kind, backend, schedules, seed, faults, timeout, nodes, torch, replicas"


class Result(NamedTuple):
    code: int
    out: str

    def counts(self, **expected: int) -> bool:
        """Return whether pytest's last line counts these, and no other failures."""
        # Torch's builds for GPUs may print more when Python ends.
        last = [line for line in self.out.splitlines() if line.startswith("==")][-1]
        return all(f"{n} {what}" in last for what, n in expected.items()) and (
            "failed" in expected or "failed" not in last
        )


class Project:
    """A folder with tests, and a pytest of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, source: str, name: str = "test_it.py") -> None:
        (self.folder / name).write_text(textwrap.dedent(source))

    def run(self, *options: str, stdin: str = "", **variables: str) -> Result:
        # Nor may a CI around us show: there pytest repeats a whole message in its summary.
        told = ("PYTEST", "COV", "CI", "BUILD_NUMBER")
        unused = os.environ["PYTEST_ADDOPTS"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(told)}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=self.folder, env={**clean, "PYTEST_ADDOPTS": unused, **variables}, input=stdin,
            text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return Result(done.returncode, done.stdout)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_body_runs_once_per_rank_with_fixtures_made_once(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp

        made = []

        @pytest.fixture
        def costly():
            made.append(1)
            yield len(made)
            assert sp.get_world_size() == 1  # torn down outside

        @pytest.mark.world(ranks=4)
        def test_one(costly, tmp_path):
            assert sp.all_gather(costly) == [1] * 4
            assert len(set(sp.all_gather(str(tmp_path)))) == 1

        @pytest.mark.world(3)
        class TestMany:
            @pytest.mark.parametrize("x", [1, 2])
            def test_two(self, x):
                assert sp.all_reduce(x) == 3 * x

        @pytest.mark.world(ranks=[1, 2], kind=["threads", "processes"], schedules=5)
        def test_three():
            sp.barrier()

        ran = []

        @pytest.mark.world(
            ranks=2, kind=["threads", "processes"], backend=["file", "torch"], schedules=[1, 5]
        )
        def test_each(request):
            ran.append(sp.get_rank())
            kind, _, which = request.node.callspec.id.split("-")
            assert sp.current().backend_name == (kind if kind == "threads" else which)
            sp.barrier()

        def test_outside():
            assert sp.get_world_size() == 1
            assert ran.count(0) == 1 + 6  # the first schedule is tried twice
    """)
    result = project.run("-v", "-W", "error", "-p", "no:randomly")
    assert result.counts(passed=12), result.out
    for name in ("threads-1", "threads-2", "processes-1", "processes-2"):
        assert f"test_three[{name}] PASSED" in result.out
    for name in ("threads-2-1", "threads-2-5", "processes-2-file", "processes-2-torch"):
        assert f"test_each[{name}] PASSED" in result.out
    assert "test_one PASSED" in result.out  # one world: its name is the function's


NO_WORLD = [
    ("schedules=0", "schedules= is the number of schedules to try, at least 1"),
    ("schedules=[1, True]", "schedules= is the number of schedules to try, at least 1"),
    ("ranks=[]", "there is no world to run in"),
    ("rank=4", f"there is no argument rank=; it takes {ARGUMENTS}"),
    ("4, 5", "only ranks can be given without a keyword"),
    ("ranks=2, faults=[Kill(rank=9, at=1)]", "Kill(rank=9, at=1): there are ranks 0 to 1"),
    ("faults=Kill(rank=1, at=1)", "faults is a list, and Kill(rank=1, at=1) is a Kill"),
    ("seed='5x'", "seed='5x': a seed is a number, pct<depth>-<steps>-<number>, or order-..."),
    ("timeout='5'", "timeout='5': it takes seconds, or a timedelta"),
    ("kind='thread'", "kind='thread': it takes 'threads' or 'processes'"),
    ("kind='processes', schedules=9", "schedules= is for worlds of threads: say kind='threads'"),
    ("backend='file'", "backend= is for worlds of processes: say kind='processes'"),
    ("kind='processes', backend='fiel'", "there is no backend named 'fiel'; known are: "),
]  # fmt: skip


WITHOUT_TORCH = """
    import sys

    class Finder:
        def find_spec(self, name, *_):
            if name == "torch":
                raise ImportError("none")

    sys.meta_path.insert(0, Finder())
"""


def test_a_mark_that_asks_for_no_world_fails_at_collection_with_its_line(project: Project) -> None:
    """On a function, a method, a class, a module, and a parameter set."""
    head = "import pytest\nfrom syncprims.testing import Kill\n"
    for number, (asked, _) in enumerate(NO_WORLD):
        mark = f"@pytest.mark.usefixtures('tmp_path')\n@pytest.mark.world({asked})\n"
        project.write(f"{head}\n{mark}def test_it(): pass\n", f"test_{number}.py")
    wrong = "pytest.mark.world(ranks=0)"
    project.write(f"{head}class TestIt:\n  @{wrong}\n  def test_it(self): pass", "test_method.py")
    project.write(f"{head}@{wrong}\nclass TestIt:\n  def test_it(self): pass", "test_class.py")
    project.write(f"{head}pytestmark = [{wrong}]\ndef test_it(): pass", "test_module.py")
    project.write(
        f"{head}@pytest.mark.parametrize('n', [1,\n pytest.param(2, marks={wrong})])\n"
        "def test_it(n): pass",
        "test_param.py",
    )
    result = project.run("-rN")
    assert result.code == 2, result.out
    failures = result.out.partition("ERRORS")[2]
    reports = re.findall(
        r"^_+ ERROR collecting (\S+) _+\n(.*)\n(?=_+ |[!=])", failures, re.MULTILINE
    )
    found = {name.partition("::")[0]: text for name, text in reports}
    assert found.keys() == {path.name for path in project.folder.glob("test_*.py")}
    for number, (_, why) in enumerate(NO_WORLD):
        name, text = f"test_{number}.py", found[f"test_{number}.py"]
        assert text.startswith(f"{name}:5: pytest.mark.world("), text
        assert f"): {why}" in text, text
    for name, line in {"method": 4, "class": 3, "module": 3, "param": 4}.items():
        said = f"test_{name}.py:{line}: {wrong}: ranks=0: a world has at least one rank"
        assert found[f"test_{name}.py"] == said


def test_a_mark_that_needs_torch_fails_its_test_where_that_is_missing(project: Project) -> None:
    project.write("""
        import pytest

        @pytest.mark.world(torch=True)
        def test_it():
            pass

        @pytest.mark.skipif(True, reason="no torch")
        @pytest.mark.world(torch=True)
        def test_skipped():
            pass
    """)
    project.write(WITHOUT_TORCH, "conftest.py")
    result = project.run("-rN")
    assert result.counts(failed=1, skipped=1), result.out
    why = f"torch=True serves torch.distributed, which cannot be imported: none. {HOW}"
    assert f"\npytest.mark.world: {why}\n" in result.out


def test_a_deadlock_is_reported_with_output_by_rank_and_the_line_to_paste(project: Project) -> None:
    project.write(BUGGY)
    result = project.run()
    assert result.counts(failed=1), result.out
    for text in (
        "DeadlockError: rank 0 of 3 waits and can never go on; ranks [1, 2] have finished",
        "rank 0: waits in its round 2, barrier 'loaded' (test_it.py:11)",
        "rank 2: finished after its round 1, barrier 'start' (test_it.py:7)",
        '>           sp.barrier("loaded")',
        "Captured stdout rank 1",
        "said by 1",
        "Captured stderr rank 2",
        "replay: pytest 'test_it.py::test_skipped' --world-seed=",
    ):
        assert text in result.out, text
    assert "scheduler.py" not in result.out  # what happens inside helps nobody


def test_a_schedule_is_replayed_from_the_command_line(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp

        order = []

        @pytest.mark.world(ranks=4, schedules=200)
        def test_order():
            if sp.is_main():
                order.clear()
            sp.barrier()
            order.append(sp.get_rank())
            sp.barrier()
            assert order != [3, 1, 2, 0]
    """)
    result = project.run()
    assert result.counts(failed=1), result.out
    assert "schedules fail; this is the shortest" in result.out
    (line,) = {line for line in result.out.splitlines() if "replay:" in line}
    seed = line.split("--world-seed=")[1].strip()
    again = project.run(f"--world-seed={seed}")
    assert "of 101 schedules fail" in again.out  # it is the first of them
    assert f"--world-seed={seed}" in again.out
    assert "UsageError" in project.run("--world-seed=soon").out.replace("ERROR: --", "UsageError")


def test_skip_xfail_and_rewritten_assertions_inside_a_rank(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp

        both = pytest.mark.world(ranks=2, kind=["threads", "processes"])

        @both
        def test_skip():
            if sp.get_rank() == 1:
                pytest.skip("no GPU")
            sp.barrier()

        @both
        def test_xfail():
            sp.barrier()
            pytest.xfail("known")

        @both
        @pytest.mark.xfail(raises=ValueError, strict=True)
        def test_marked():
            raise ValueError

        @both
        def test_assertion():
            found = {"rank": sp.get_rank()}
            assert found == {"rank": 0}
    """)
    result = project.run("-rs")
    assert result.counts(failed=2, skipped=2, xfailed=4), result.out
    assert "no GPU" in result.out
    assert result.out.count("assert {'rank': 1} == {'rank': 0}") >= 2


def test_capturing_fixtures_see_what_ranks_print(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp

        @pytest.mark.world(2)
        def test_capsys(capsys):
            sp.print_main("once")
            sp.barrier()
            if sp.is_main():
                assert capsys.readouterr().out == "once\\n"

        @pytest.mark.world(2)
        def test_caplog(caplog):
            sp.get_logger("x").warning("careful")
            sp.barrier()
            assert [r.getMessage() for r in caplog.records if "rank 1" in r.getMessage()]
    """)
    assert project.run().counts(passed=2)


@both_kinds
def test_without_capture_lines_have_their_rank_in_front(project: Project, kind: str) -> None:
    project.write(f"""
        import pytest
        import syncprims as sp

        @pytest.mark.world(ranks=2, kind="{kind}")
        def test_print():
            print("hello")
            sp.barrier()
    """)
    out = project.run("-s").out
    assert "[rank 0] hello\n" in out
    assert "[rank 1] hello\n" in out


def test_stopping_at_the_first_failure_leaves_nothing(project: Project) -> None:
    project.write(
        textwrap.dedent(BUGGY)
        + textwrap.dedent("""
        import threading

        def test_never():
            pass

        @pytest.fixture(autouse=True, scope="session")
        def nothing():
            yield
            assert threading.active_count() == 1
    """)
    )
    result = project.run("-x", "-p", "no:randomly")
    assert "1 failed" in result.out
    assert "passed" not in result.out
    assert "error" not in result.out.splitlines()[-1]


def test_the_debugger_looks_into_a_rank(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp

        @pytest.mark.world(ranks=2, timeout=2)
        def test_breakpoint():
            mine = f"I am {sp.get_rank()}"
            sp.barrier()
            if sp.get_rank() == 1:
                breakpoint()
            sp.barrier()

        @pytest.mark.world(ranks=2)
        def test_raises():
            mine = f"it was {sp.get_rank()}"
            if sp.get_rank() == 1:
                raise ValueError
            sp.barrier()
    """)
    script = "import time; time.sleep(3)\np mine\nc\n"  # longer than the world's timeout
    out = project.run("-k", "breakpoint", stdin=script).out
    assert "'I am 1'" in out
    assert "1 passed" in out
    out = project.run("--pdb", "-k", "raises", stdin="p mine\nq\n").out
    assert "'it was 1'" in out


def test_it_loads_neither_torch_nor_numpy(project: Project) -> None:
    project.write("""
        import sys, pytest
        import syncprims as sp

        @pytest.mark.world(ranks=2, kind=["threads", "processes"])
        def test_light():
            sp.barrier()
            assert not {"torch", "numpy"} & set(sys.modules)
    """)
    assert project.run("-p", "no:randomly").counts(passed=2)  # that one loads numpy itself


def test_what_would_run_once_only_is_refused(project: Project) -> None:
    """Also where a plugin would run the coroutine, as pytest-asyncio does."""
    project.write("""
        import asyncio
        import unittest
        import pytest

        class Runner:
            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_call(self, item):
                runs, body = item.runtest, item.obj

                def runtest():
                    item.obj = lambda: asyncio.run(body())
                    runs()

                item.runtest = runtest
                return (yield)

        @pytest.fixture(scope="session")
        def runner(request):
            request.config.pluginmanager.register(Runner())

        @pytest.mark.world(2)
        class TestOld(unittest.TestCase):
            def test_it(self):
                pass

        @pytest.mark.world(2)
        async def test_async():
            pass

        @pytest.mark.world(2)
        async def test_run_by_a_plugin(runner):
            pass
    """)
    result = project.run("-p", "no:randomly")
    assert result.counts(failed=3), result.out
    assert "call syncprims.testing.run_world" in result.out
    assert result.out.count("call asyncio.run inside") >= 2


def test_a_timeout_of_pytests_ends_the_world(project: Project) -> None:
    pytest.importorskip("pytest_timeout")
    project.write("""
        import threading
        import pytest
        import syncprims as sp

        @pytest.mark.timeout(2)
        @pytest.mark.world(ranks=2, kind=["threads", "processes"])
        def test_hangs():
            sp.barrier()
            while sp.get_rank():
                pass
            sp.barrier()

        def test_after():
            assert threading.active_count() == 1
    """)
    result = project.run("-p", "no:randomly")
    assert result.counts(failed=2, passed=1), result.out
    assert result.out.count("from pytest-timeout") >= 2


def run_once(project: Project, make: str, tests: str) -> tuple[Result, int]:
    """Run tests that use a thing of the session in two workers; return how often it was made."""
    log = project.folder / "log"
    project.write(f"""
        import os, pathlib, signal
        import pytest
        from syncprims.testing import once_per_session

        log = pathlib.Path({str(log)!r})
        six = pytest.mark.parametrize("number", range(6))

        def make():
            first = not log.exists()
            with log.open("a") as file:
                file.write(".")
            {make}

        @pytest.fixture(scope="session")
        def data():
            return once_per_session("data", make)
    """)
    with (project.folder / "test_it.py").open("a") as file:
        file.write(textwrap.dedent(tests))
    return project.run("-n", "2"), len(log.read_text())


def test_one_worker_makes_it_and_all_have_it(project: Project) -> None:
    result, made = run_once(project, 'return {"answer": 42}', """
        @pytest.mark.world(ranks=2, kind=["threads", "processes"])
        def test_worlds(data):
            assert data == once_per_session("data", make) == {"answer": 42}

        @six
        def test_it(number, data):
            assert data == {"answer": 42}
    """)  # fmt: skip
    assert result.counts(passed=8), result.out
    assert made == 1


def test_a_killed_maker_is_replaced(project: Project) -> None:
    make = "return os.kill(os.getpid(), signal.SIGKILL) if first else 42"
    result, made = run_once(project, make, """
        @six
        def test_it(number):
            assert once_per_session("data", make) == 42
    """)  # fmt: skip
    assert result.counts(failed=1, passed=5), result.out  # xdist fails the test of the killed
    assert made == 2


def test_a_failing_maker_fails_all_with_its_cause(project: Project) -> None:
    result, made = run_once(project, 'raise LookupError("no such data set")', """
        @six
        def test_it(number):
            with pytest.raises(LookupError, match="no such data set"):
                once_per_session("data", make)
    """)  # fmt: skip
    assert result.counts(passed=6), result.out
    assert made == 1


def test_what_ranks_patch_is_undone(project: Project) -> None:
    """Decorators of mock are made once; variables that ranks have set are theirs."""
    project.write("""
        import os, time
        from unittest import mock
        import pytest
        import syncprims as sp

        lasting = time.ctime, time.asctime

        @pytest.mark.world(ranks=3, schedules=20)
        @mock.patch("time.ctime")
        @mock.patch("time.asctime", return_value="now")
        def test_function(asctime, ctime, tmp_path):
            sp.barrier()
            assert time.ctime is ctime and time.asctime() == "now"
            sp.barrier()

        @pytest.mark.world(ranks=2, kind=["threads", "processes"])
        class TestMethod:
            @mock.patch("time.ctime")
            def test_method(self, ctime, tmp_path):
                sp.barrier()
                assert time.ctime is ctime
                sp.barrier()

        @pytest.mark.world(ranks=2, torch=True)
        def test_variables(monkeypatch):
            monkeypatch.setenv("RANK", os.environ["RANK"])
            monkeypatch.setenv("OWN", "1")
            monkeypatch.setattr(time, "ctime", None)
            sp.barrier()

        def test_outside(monkeypatch):
            assert (time.ctime, time.asctime) == lasting
            assert not {"RANK", "OWN"} & {*os.environ}
    """)
    result = project.run("-p", "no:randomly")
    assert result.counts(passed=5), result.out


def test_a_mark_of_a_parameter_set_names_one_world(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp

        one, two = pytest.mark.world(ranks=2), pytest.mark.world(ranks=[2, 3])

        @pytest.mark.parametrize("n", [pytest.param(2, marks=one), pytest.param(3, marks=two)])
        def test_it(n):
            assert sp.get_world_size() == n
    """)
    result = project.run()
    assert result.code == 2, result.out
    assert "test_it.py:7: pytest.mark.world(ranks=[2, 3]): a mark of one parameter" in result.out


def test_a_failure_says_that_a_world_has_stalled_before(project: Project) -> None:
    project.write("""
        import threading
        import pytest

        @pytest.mark.world(ranks=1, timeout=0.1)
        def test_first():
            threading.Event().wait(10)

        def test_second():
            assert not "right"

        def test_third():
            pass
    """)
    done = project.run("-p", "no:randomly")
    assert done.counts(failed=2, passed=1)
    said = "A world has stalled in this process before, in test_it.py::test_first. See that first."
    assert done.out.count(said) == 1


# -- other plugins and forms of tests --------------------------------------------------------------


WITH = {
    "hypothesis": (["hypothesis"], """
        from hypothesis import given, strategies as st

        @both
        @given(st.lists(st.integers()))
        def test_it(drawn):
            assert sp.all_gather(drawn) == [drawn] * 2
     """, [], {"passed": 2}, ""),
    "`st.data()`": (["hypothesis"], """
        from hypothesis import given, strategies as st

        @both
        @given(st.data())
        def test_it(data):
            data.draw(st.integers())

        @both
        @given(st.randoms(use_true_random=False))
        def test_other(random):
            sp.all_gather(random.random())
     """, [], {"failed": 4}, "a rank has drawn values"),
    "asyncio": (["pytest_asyncio"], """
        import asyncio, pytest_asyncio

        @pytest_asyncio.fixture
        async def four():
            return 4

        @both
        def test_it(four):
            async def body():
                await asyncio.sleep(0)
                return sp.all_reduce(four)
            assert asyncio.run(body()) == 8
     """, ["-o", "asyncio_mode=auto"], {"passed": 2}, ""),
    "anyio": (["anyio"], """
        import anyio

        @both
        def test_it():
            async def body():
                await anyio.sleep(0)
                return sp.all_reduce(4)
            assert anyio.run(body) == 8
     """, [], {"passed": 2}, ""),
    "trio": (["trio", "pytest_trio"], """
        import trio

        @both
        def test_it():
            async def body():
                await trio.sleep(0)
                return sp.all_reduce(4)
            assert trio.run(body) == 8
     """, [], {"passed": 2}, ""),
    "`async def`": (["pytest_asyncio", "pytest_trio", "anyio", "hypothesis"], """
        import functools
        from hypothesis import given, strategies as st

        @both
        @pytest.mark.asyncio
        async def test_asyncio():
            pass

        @both
        @pytest.mark.trio
        async def test_trio():
            pass

        @both
        @pytest.mark.anyio
        async def test_anyio(anyio_backend_name):
            pass

        @both
        @given(st.integers())
        async def test_drawn(drawn):
            pass

        def decorated(body):
            @functools.wraps(body)
            def call():
                return body()
            return call

        @both
        @decorated
        async def test_hidden():
            sp.barrier()
     """, [], {"failed": 12}, "pytest.mark.world runs plain functions: call asyncio.run inside"),
    "`unittest.TestCase`": ([], """
        import unittest
        from syncprims.testing import run_world

        class TestIt(unittest.TestCase):
            def test_it(self):
                self.assertEqual(run_world(sp.get_rank, 2), [0, 1])

        @both
        class TestMarked(unittest.TestCase):
            def test_it(self):
                pass
     """, [], {"passed": 1, "failed": 1}, "call syncprims.testing.run_world"),
    "`subtests`": ([], """
        @both
        def test_it(subtests):
            with subtests.test("part"):
                sp.barrier()
     """, [], {"passed": 1, "failed": 1}, "subtests reports to the process of pytest"),
    "pytest-xdist": (["xdist"], """
        @both
        def test_it():
            sp.barrier()
     """, ["-n", "2"], {"passed": 2}, "created: 2/2 workers"),
    "pytest-cov": (["pytest_cov"], """
        from program import work

        @pytest.mark.world(2, kind="processes")
        def test_it():
            work()
     """, ["--cov=program"], {"passed": 1}, "100%"),
    "pytest-randomly": (["pytest_randomly"], """
        @both
        def test_it():
            sp.barrier()
     """, [], {"passed": 2}, "Using --randomly-seed="),
    "pytest-timeout": (["pytest_timeout"], """
        @both
        def test_it():
            sp.barrier()
            while sp.get_rank():
                pass
            sp.barrier()
     """, ["--timeout=1"], {"failed": 2}, "from pytest-timeout"),
    "pytest-rerunfailures": (["pytest_rerunfailures"], """
        from pathlib import Path

        @both
        def test_it(request):
            sp.barrier()
            first = sp.is_main() and not (log := Path(f"{request.node.name}.log")).exists()
            if first:
                log.touch()
            assert not first
            sp.barrier()
     """, ["--reruns=1"], {"passed": 2, "rerun": 2}, ""),
    "pytest-repeat": (["pytest_repeat"], """
        @both
        def test_it():
            sp.barrier()
     """, ["--count=3"], {"passed": 6}, ""),
}  # fmt: skip
HEAD = """
        import pytest
        import syncprims as sp

        both = pytest.mark.world(ranks=2, kind=["threads", "processes"])
"""
WITH_HYPOTHESIS = "-p no:asyncio -p no:trio"
BY_RANK = """
    import syncprims as sp

    def work():
        if sp.get_rank():
            mine = "the second's"
        else:
            mine = "the first's"
        sp.barrier()
        return mine
"""


@pytest.mark.parametrize("row", WITH)
def test_a_plugin_or_form_works_as_its_row_on_the_page_says(project: Project, row: str) -> None:
    modules, source, options, counts, said = WITH[row]
    for module in modules:
        pytest.importorskip(module)
    if row == "`subtests`" and not hasattr(pytest, "Subtests"):
        pytest.skip("older pytests have no subtests")
    project.write(HEAD + source)
    project.write(BY_RANK, "program.py")
    result = project.run(*options, PYTEST_ADDOPTS="")
    assert result.counts(**counts), result.out
    assert said in result.out


def test_each_row_on_the_page_has_a_test() -> None:
    (table,) = [t for t in tables(ROOT / "docs/testing.md") if t.columns[0] == "plugin or form"]
    assert {one for cell in table.column() for one in cell.split(", ")} == {*WITH}


@both_kinds
def test_an_example_of_hypothesis_is_shrunk_once_for_all_ranks(project: Project, kind: str) -> None:
    pytest.importorskip("hypothesis")
    project.write(f"""
        import pytest
        import syncprims as sp
        from hypothesis import Phase, assume, given, note, settings, strategies as st
        from unittest import mock

        several = pytest.mark.world(ranks=2, kind="{kind}")
        phases = [Phase.generate, Phase.shrink]
        few = settings(max_examples=10, derandomize=True, phases=phases)

        @several
        class TestMethod:
            @few
            @given(x=st.integers(0, 100))
            @mock.patch("time.ctime", return_value="now")
            def test_it(self, ctime, x):
                import time
                assume(x % 2 == 0)
                assert time.ctime() == "now"
                sp.barrier()
                if x > 2 and sp.get_rank() == 1:
                    note("too large")
                    raise ValueError(x)
                sp.barrier()

        @several
        @few
        @given(x=st.integers(0, 100))
        def test_skipped(x):
            sp.barrier("first")
            if x > 1 and sp.get_rank() == 1:
                return
            sp.barrier("second")
    """)
    result = project.run("-W", "error", PYTEST_ADDOPTS=WITH_HYPOTHESIS)
    assert result.counts(failed=2), result.out
    assert "rank 1 of 2: raised ValueError: 4 after its round 1, barrier" in result.out
    assert "DeadlockError: rank 0 of 2 waits and can never go on; rank 1 has" in result.out
    for found in ("x=4,", "x=2,"):
        assert result.out.count(found) == 1, result.out
    if kind == "threads":
        assert result.out.count("--world-seed=") == 2, result.out
        assert result.out.count("too large") == 1 + 1  # the line itself


def test_hypothesis_finds_an_order_again(project: Project) -> None:
    """Its engine runs an example more than once: with the seed of the first time."""
    pytest.importorskip("hypothesis")
    project.write("""
        import pytest
        import syncprims as sp
        from hypothesis import given, settings, strategies as st

        order = []

        @pytest.mark.world(ranks=2, torch=True)
        @settings(max_examples=5)
        @given(st.integers(0, 100))
        def test_torch(x):
            import torch
            torch.distributed.init_process_group("gloo")
            torch.distributed.all_reduce(total := torch.tensor(x))
            assert total == 2 * x

        @pytest.mark.world(ranks=3, schedules=60)
        @settings(max_examples=20, derandomize=True)
        @given(st.integers(0, 100))
        def test_it(x):
            if sp.is_main():
                order.clear()
            sp.barrier()
            order.append(sp.get_rank())
            sp.barrier()
            assert x < 7 or order != [2, 1, 0]
    """)
    result = project.run(PYTEST_ADDOPTS=WITH_HYPOTHESIS)
    assert result.counts(passed=1, failed=1), result.out
    assert "schedules fail; this is the shortest" in result.out
    assert "Flaky" not in result.out
    assert "    7,\n" in result.out or "x=7," in result.out


def test_a_mark_drops_no_result(project: Project) -> None:
    project.write("""
        import pytest

        @pytest.mark.world(ranks=2, kind=["threads", "processes"])
        def test_it():
            return 1 == 2
    """)
    result = project.run()
    assert result.counts(failed=2), result.out
    assert "the test returned False, which is no check: assert it" in result.out
