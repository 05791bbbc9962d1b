"""Private names of other packages: each is there, and an error names one that is gone."""

from __future__ import annotations

import subprocess
import sys

_BEGIN = """
import os, sys
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import SimpleNamespace
from syncprims._system.upstream import installed_tables
from syncprims.errors import BackendUnavailable

tables = {table.room: table for table in installed_tables()}
installed = [
    (table, name) for table in tables.values() for name in table.names.values()
    if find_spec(name.module.partition(".")[0])
]

def remove(name):
    owner, _, last = name.path.rpartition(".")
    module = import_module(name.module)
    owner = attrgetter(owner)(module) if owner else module
    if hasattr(owner, last):
        delattr(owner, last)
    return not hasattr(owner, last)

def forked(check, *args):
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        check(*args)
    except BaseException as error:
        print(args, type(error), error)
    sys.stdout.flush()
    os._exit(0)
"""


def run(source: str) -> str:
    command = [sys.executable, "-c", _BEGIN + source]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_the_installed_packages_have_every_name() -> None:
    source = """
def show():
    print(*(line for table in tables.values() for line in table.report()), sep="\\n", end="")
show()  # as their files say
for _, name in installed:
    import_module(name.module)
show()
print(*tables)
"""
    assert run(source) == "backends.torch _world c10d testing training\n"


def test_a_name_that_is_gone_is_named() -> None:
    source = """
for _, name in installed:
    import_module(name.module)
list(tables.values())[0].report()

def check(table, name):
    *owners, _ = name.path.split(".")
    thing = SimpleNamespace()
    for owner in reversed(owners):
        thing = SimpleNamespace(**{owner: thing})
    sys.modules[name.module] = thing
    full = f" has no {name.module}.{name.path}, by which syncprims.{table.room} {name.why}"
    if not name.since and not name.until:
        assert any(full in line for line in table.report()), table.report()
    if name.without:
        assert table[name.path] is None
        return
    for read in lambda: table[name.path], lambda: table.of(object(), name.path, 0):
        try:
            read()
        except BackendUnavailable as error:
            assert full in str(error) and "or a newer syncprims" in str(error), error
        else:
            print("no error", name)

for table, name in installed:
    forked(check, table, name)
"""
    assert run(source) == ""


def test_training_is_imported_without_them_and_fails_where_it_needs_one() -> None:
    source = """
import torch
for _, name in installed:
    import_module(name.module)
removed = [name for table, name in installed if table.room == "training" and remove(name)]
assert len(removed) > 10
import syncprims.training
try:
    syncprims.training.Accumulator()
except BackendUnavailable as error:
    print(error)
"""
    assert "has no torch._C._current_graph_task_id, by which" in run(source)


def test_no_world_serves_torch_without_one_of_its_names() -> None:
    source = """
from syncprims.testing import run_world, torch_worlds
names = [name for name in tables["c10d"].names.values() if not name.without]
for name in names:
    import_module(name.module)

def check(name, kind):
    if not remove(name):
        return  # torch.ops makes it again
    try:
        run_world(print, 2, torch=True, kind=kind)
    except BackendUnavailable as error:
        assert name.path in str(error), error
    else:
        print("no error", name)

for name in names:
    for kind in "threads", "processes":
        forked(check, name, kind)
"""
    assert run(source) == ""
