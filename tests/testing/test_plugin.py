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
        clean = {k: v for k, v in os.environ.items() if not k.startswith(told)}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=self.folder, env={**clean, **variables}, input=stdin, text=True,
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
    ("seed='5x'", "seed='5x': a seed is a number, pct<depth>-<steps>-<number>, or order-..."),
    ("timeout='5'", "timeout='5': it takes seconds, or a timedelta"),
    ("torch=True", f"torch=True serves torch.distributed, which cannot be imported: none. {HOW}"),
]  # fmt: skip


WITHOUT_TORCH = """
    import sys

    class Finder:
        def find_spec(self, name, *_):
            if name == "torch":
                raise ImportError("none")

    sys.meta_path.insert(0, Finder())
"""


def test_a_mark_that_asks_for_no_world_fails_its_test_in_one_line(project: Project) -> None:
    tests = [
        f"@pytest.mark.world({asked})\ndef test_{number}(): pass\n"
        for number, (asked, _) in enumerate(NO_WORLD)
    ]
    head = "import pytest\nfrom syncprims.testing import Kill\ndef test_other(): pass\n"
    project.write("\n".join([head, *tests]))
    project.write(WITHOUT_TORCH, "conftest.py")
    result = project.run("-rN")
    assert result.counts(failed=len(NO_WORLD), passed=1), result.out
    failures = result.out.partition("FAILURES")[2]
    reports = re.findall(r"^_+ test_(\d+) _+\n(.*)\n(?=_+ test|=)", failures, re.MULTILINE)
    assert {int(number): text for number, text in reports} == {
        number: f"pytest.mark.world: {why}" for number, (_, why) in enumerate(NO_WORLD)
    }


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


def test_coverage_counts_all_ranks(project: Project) -> None:
    """With the lines that docs/testing.md gives for processes."""
    pytest.importorskip("pytest_cov")
    lines = '[tool.coverage.run]\npatch = ["_exit"]\nparallel = true\n'
    page = (ROOT / "docs/testing.md").read_text()
    assert lines in textwrap.dedent(page.split("```toml")[1].split("```")[0])
    project.write(lines, "pyproject.toml")
    project.write(
        """
        import syncprims as sp

        def work():
            if sp.get_rank() == 1:
                mine = "the second's"
            elif sp.get_rank() == 2:
                mine = "the third's"
            else:
                mine = "nobody's in particular"
            sp.barrier()
            return mine
        """,
        "program.py",
    )
    for kind in ("threads", "processes"):
        project.write(f"""
            import pytest
            from program import work

            @pytest.mark.world(ranks=3, kind="{kind}")
            def test_it():
                work()
        """)
        result = project.run("--cov=program")
        (line,) = [line for line in result.out.splitlines() if line.startswith("program.py")]
        assert line.split()[-1] == "100%", result.out


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


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="older pytests have no subtests")
def test_what_would_be_lost_in_processes_is_refused(project: Project) -> None:
    project.write("""
        import pytest
        import syncprims as sp
        @pytest.mark.world(ranks=2, kind=["threads", "processes"])
        def test_parts(subtests):
            with subtests.test("part"):
                sp.barrier()
    """)
    result = project.run()
    assert result.counts(passed=1, failed=1), result.out
    assert "subtests reports to the process of pytest" in result.out


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
    assert result.counts(passed=1, failed=1), result.out
    assert "world: a mark of one parameter set" in result.out


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
