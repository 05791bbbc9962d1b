"""The pytest plugin: its options, and the parts that do what they ask for.

Pytest loads it at every start, wherever this package is installed: it must import neither torch nor
numpy.
"""

from __future__ import annotations

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
    group.addoption(
        "--syncprims-worlds",
        action="store_true",
        help="serve the process groups of a suite's own launchers by worlds of processes",
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
    if config.getoption("syncprims_worlds"):
        config.pluginmanager.register(_Suites(config))


class _Suites:
    """Serves a suite that launches its own ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._serves = False
        try:
            from .torch_worlds.suite_processes import SuiteProcesses  # imports torch
        except ImportError as error:
            raise pytest.UsageError(f"--syncprims-worlds needs torch: {error}") from None
        self._suites: Any = SuiteProcesses()
        config.add_cleanup(self._suites.close)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Note what the suite has imported."""
        self._serves = not session.config.pluginmanager.hasplugin("dsession")  # of pytest-xdist
        if self._serves:
            self._suites.start()
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many process groups of a suite were worlds, and why others were not."""
        if self._serves:
            terminalreporter.section("process groups in worlds of syncprims")
            for line in self._suites.report():
                terminalreporter.line(line)
