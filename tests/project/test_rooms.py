"""Rooms that one can remove: all that does not build on a room works without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support import ROOT
from support.sources import CORE, SOURCES, count_code, imports, is_in

#: The modules that import a room when they are imported themselves.
BUILT_ON = {
    "accelerate": set[str](),
    "backends.torch": set[str](),
    "c10d": {"testing.torch_worlds"},
    "cli": {"__main__"},
    "testing": set[str](),
    "tracing": {"cli", "__main__"},
    "training": {"accelerate", "testing.torch_worlds.replicas"},
    "who": {"cli", "__main__"},
}

_IMPORT_ALL = """
import importlib, os, sys
import torch  # once, and not for each copy
for line in sys.stdin.read().splitlines():
    copy, *names = line.split()
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0, copy
        continue
    sys.path.insert(0, copy)
    for name in names:
        importlib.import_module(name)
    assert sys.modules["syncprims"].__file__.startswith(copy)
    os._exit(0)
"""
_RANK = """
import syncprims as sp
sp.barrier("begin")
print(sp.all_reduce(sp.get_rank()), sp.broadcast("x" * sp.get_rank(), src=1), sp.any_rank(True))
"""


def named(*names: str) -> set[str]:
    return {f"syncprims.{name}" for name in names}


def depending_on(room: str) -> set[str]:
    """Return all modules that cannot be imported without a room: its own, and the others."""
    found = {module for module in SOURCES if is_in(module, f"syncprims.{room}")}
    while True:
        more = {m for m in SOURCES if imports(m, at_import_time=True) & found} - found
        # To import a module is to import the packages that it is in.
        more |= {m for m in SOURCES if m.rpartition(".")[0] in found} - found
        if not more:
            return found
        found |= more


def start(source: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source], env={**os.environ, **variables},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def copy_without(room: str, copy: Path) -> list[str]:
    """Make a copy of the package without a room, and return the modules that it leaves."""
    ignore = shutil.ignore_patterns("*.pyc.*", "*-pytest-*")  # other tests write them now
    shutil.copytree(ROOT / "syncprims", copy / "syncprims", ignore=ignore)
    shutil.copytree(ROOT / "backends", copy / "syncprims" / "backends", ignore=ignore)
    shutil.rmtree(copy / "syncprims" / room.replace(".", "/"))
    gone = depending_on(room)
    assert not {m for m in gone if any(is_in(m, name) for name in named(*CORE))}
    built_on = named(room, *BUILT_ON[room])
    assert not {m for m in gone if not any(is_in(m, name) for name in built_on)}, "they need it"
    return sorted(set(SOURCES) - gone - named("testing.plugin"))  # the plugin runs already


def test_all_else_works_without_a_room(tmp_path: Path, meeting_place: Path) -> None:
    copies = {tmp_path / room: copy_without(room, tmp_path / room) for room in BUILT_ON}
    names = "\n".join(" ".join([str(copy), *left]) for copy, left in copies.items())
    importing = start(_IMPORT_ALL)
    said = [importing.communicate(names)[0]]
    for copy in copies:
        ranks = [
            start(
                _RANK, PYTHONPATH=str(copy), SYNCPRIMS_BACKEND="file",
                SYNCPRIMS_DIR=str(meeting_place), SYNCPRIMS_RUN_ID=copy.name,
                SYNCPRIMS_RANK=str(rank), SYNCPRIMS_WORLD_SIZE="2",
            )
            for rank in range(2)
        ]  # fmt: skip
        said += [process.communicate()[0] for process in ranks]
    assert [importing.returncode, said] == [0, ["", *["1 x True\n"] * 2 * len(copies)]]


def lines_of_code(name: str) -> int:
    return sum(count_code(SOURCES[m]) for m in SOURCES if is_in(m, f"syncprims.{name}"))


def test_the_page_says_the_sizes_of_core_and_rooms() -> None:
    page = (ROOT / "docs/concepts/architecture.md").read_text()
    rows = re.findall(r"^\| ([\w. ]+) \| ([\d,]+) \|", page, re.MULTILINE)
    said = {name: int(number.replace(",", "")) for name, number in rows}
    present = {room: lines_of_code(room) for room in BUILT_ON}
    present["the core"] = sum(map(lines_of_code, CORE))
    assert said.keys() == present.keys()
    wrong = {n: (said[n], present[n]) for n in said if not 0.9 < said[n] / present[n] < 1.1}
    assert not wrong, "what the page says, and what there is"
