"""The pytest plugin: its options, and the parts that do what they ask for.

Pytest loads it at every start, wherever this package is installed: it must import neither torch nor
numpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from . import world_mark
from .once_per_session import session_folder
from .scheduler import Seed
from .torchrun_items import TorchrunItems


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--world-seed`` and ``--syncprims-worlds``."""
    group = parser.getgroup("syncprims", "worlds of ranks (syncprims)")
    group.addoption(
        "--world-seed",
        metavar="SEED",
        help="the schedule of worlds of threads, as a failure's report prints it",
    )
    for value in ("", "=threads", "=processes"):
        group.addoption(  # no optional value: that would be the path that follows
            f"--syncprims-worlds{value}",
            action="store_const",
            const=value[1:] or "processes",
            help="run the ranks of a suite's own launchers in worlds (of processes, if not said)",
            dest="syncprims_worlds",
        )
    group.addoption(
        "--syncprims-worlds-ranks",
        type=int,
        metavar="N",
        help="run each test on N ranks, with all its fixtures, as torchrun -m pytest does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, say where values of the session are, and register what is asked for."""
    seed, ranks = config.getoption("world_seed"), config.getoption("syncprims_worlds_ranks")
    try:
        if seed is not None:
            Seed.read(seed)
    except ValueError as error:
        raise pytest.UsageError(f"--world-seed: {error}") from None
    if ranks is not None and ranks < 1:
        raise pytest.UsageError(f"--syncprims-worlds-ranks={ranks}: it takes a number of ranks")

    def find_folder() -> Path:
        base: Path = cast("Any", config)._tmp_path_factory.getbasetemp()
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        if worker is None:
            return base / "syncprims-once"
        return base.parent / f"syncprims-once-{worker['testrunuid']}"  # that of all workers

    token = session_folder.set(find_folder)
    config.add_cleanup(lambda: session_folder.reset(token))
    config.addinivalue_line("markers", world_mark.DESCRIPTION)
    config.pluginmanager.register(world_mark)
    if ranks is not None:
        config.pluginmanager.register(TorchrunItems(ranks))
    if config.getoption("syncprims_worlds") is not None:
        config.pluginmanager.register(_Suites(config))


class _Suites:
    """Serves a suite that launches its own ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._serves = False
        filters = [*warnings.filters]  # of pytest: torch adds its own
        try:
            # These import torch.
            if config.getoption("syncprims_worlds") == "threads":
                from .torch_worlds.suites import SuiteThreads

                self._suites: Any = SuiteThreads()
            else:
                from .torch_worlds.suite_processes import SuiteProcesses

                self._suites = SuiteProcesses(filters)
        except ImportError as error:
            raise pytest.UsageError(f"--syncprims-worlds needs torch: {error}") from None
        config.add_cleanup(self._suites.close)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Serve the suite, which has imported what it uses.

        Here, since pytest records warnings until the end of the collection.
        """
        self._serves = not session.config.pluginmanager.hasplugin("dsession")  # of pytest-xdist
        if self._serves:
            self._suites.start()
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many launches of a suite ran in worlds, and why others did not."""
        if self._serves:
            terminalreporter.section("launches in worlds of syncprims")
            for line in self._suites.report():
                terminalreporter.line(line)
