"""The layers: each imports only those below it, and nothing imports in a circle.

``docs/concepts/architecture.md`` shows the same picture to people.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support import ROOT
from support.sources import SOURCES, imports, is_in, parsed

PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
#: What each part of ``syncprims/`` may import beside itself: all parts before it.
LAYERS = ["errors", "_system", "interface", "_protocol", "_data", "_world", "_api", ""]
#: What stands on the layers, and which internals it may import. ``""`` is what users import.
ROOMS = {
    "who": {"_system", "errors", "interface", "_protocol", "_world", "", "backends"},
    "tracing": {"errors", "interface", "_protocol"},
    "testing": {
        "_system",
        "errors",
        "interface",
        "_protocol",
        "_data",
        "_world",
        "",
        "c10d",
        "training",
    },
    "training": {"_system", "errors", "_protocol", "_data", "_world", ""},
    "c10d": {"_system", "errors", "interface", "_protocol", "_data", "_world"},
    "accelerate": {"training", "testing", "_world", "_api", ""},
    "cli": {"_system", "errors", "interface", "_world", "", "who", "tracing"},
    "__main__": {"cli"},
}  # fmt: skip
BACKENDS = {"single": set[str](), "threads": set[str](), "file": set[str](), "torch": {"file"}}

#: Libraries that nobody should pay for who does not use them, and the modules that exist for them.
HEAVY = {"torch", "numpy", "filelock", "safetensors", "tqdm", "pytest", "matplotlib"}
ROOM_FOR = {
    "syncprims.backends.torch": {"torch", "numpy"},
    "syncprims.testing.plugin": {"pytest"},
    "syncprims.testing.torchrun_items": {"pytest"},
    "syncprims.testing.world_mark": {"pytest"},
    "syncprims.tracing": {"numpy"},
    "syncprims.training": {"torch", "numpy", "safetensors"},
    "syncprims.accelerate": {"torch", "numpy"},
    "syncprims.c10d": {"torch"},
    "syncprims.testing.torch_worlds": {"torch", "numpy"},
}


def part(module: str) -> str:
    """Return the layer, room or file of ``syncprims/`` that a module belongs to."""
    return module.partition(".")[2].partition(".")[0]


@cache
def code(module: str) -> str:
    """Return a module's code without its docstrings and comments."""
    tree = ast.parse(SOURCES[module].read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0].value = ast.Constant("")
    return ast.unparse(tree)


def test_in_the_package_stand_only_layers_and_rooms() -> None:
    found = {path.name for path in (ROOT / "syncprims").iterdir() if path.name != "__pycache__"}
    files = {"__init__.py", "__main__.py", "errors.py", "interface.py", "py.typed"}
    folders = {name for name in [*LAYERS, *ROOMS] if name and (ROOT / "syncprims" / name).is_dir()}
    assert found == files | folders


def test_a_module_imports_only_what_is_below_it() -> None:
    wrong: list[str] = []
    for module in SOURCES:
        own = part(module)
        if own == "backends":
            continue
        allowed = ROOMS[own] if own in ROOMS else set(LAYERS[: LAYERS.index(own)])
        wrong += [
            f"{module} imports {name}"
            for name in imports(module)
            if is_in(name, "syncprims") and part(name) not in allowed | {own}
        ]
    assert wrong == []


def test_backends_know_the_contract_only() -> None:
    wrong: list[str] = []
    for module in SOURCES:
        if module == "syncprims.backends" or part(module) != "backends":
            continue
        own = module.split(".")[2]
        siblings = {f"syncprims.backends.{name}" for name in {own} | BACKENDS[own]}
        allowed = siblings | {"syncprims.errors", "syncprims.interface", "syncprims._system"}
        wrong += [
            f"{module} imports {name}"
            for name in imports(module)
            if is_in(name, "syncprims") and not any(is_in(name, known) for known in allowed)
        ]
    assert wrong == []


def test_nothing_imports_in_a_circle() -> None:
    graph = {
        module: {name for name in imports(module) if name in SOURCES and name != module}
        for module in SOURCES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_one_module_locks_files() -> None:
    locking = re.compile(r"import filelock|\bflock\(|\blockf\(")
    assert [module for module in SOURCES if locking.search(code(module))] == [
        "syncprims._system.locks"
    ]


def test_a_heavy_library_is_imported_only_where_a_module_exists_for_it() -> None:
    for module in SOURCES:
        rooms = [libraries for room, libraries in ROOM_FOR.items() if is_in(module, room)]
        found = {name.partition(".")[0] for name in imports(module, at_import_time=True)}
        assert found & HEAVY <= set[str]().union(*rooms), module


def test_training_needs_no_library_beside_those_of_its_extra() -> None:
    known = {"syncprims", "torch", "numpy", "safetensors", "tqdm", "xxhash"}
    for module in SOURCES:
        if part(module) == "training":
            tops = {name.partition(".")[0] for name in imports(module)}
            assert tops <= known | sys.stdlib_module_names, module


#: Documented in spite of their names: functions of Python and torch, and attributes of tuples.
PUBLIC = {
    "sys._getframe", "sys._current_frames", "os._exit", "_replace", "_asdict", "_fields", "_make",
    "torch._foreach_copy_", "torch._foreach_mul_",
    "_hypothesis_internal_use_settings",  # of a test function: no module has it
    "ctypes.pythonapi._PyEval_SetProfile",  # of C, and of Python 3.11 alone
}  # fmt: skip
#: Until it has a table.
WITHOUT_TABLE = {
    "syncprims._protocol.threads",
    "syncprims.testing.plugin",
    "syncprims.testing.torch_worlds.suite_processes",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


@cache
def defined_in(room: str) -> set[str]:
    """Return the private names that a room, or the core, gives to functions and attributes."""
    found: set[str] = set()
    rooms = LAYERS if room in LAYERS else [room]
    for module in SOURCES:
        for node in ast.walk(parsed(module)) if part(module) in rooms else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def foreign_reads(module: str) -> set[str]:
    """Return the private names of other packages that a module names in its code."""
    theirs: set[str] = set()  # modules of other packages, by the names that they have here
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = "" if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
            for alias in node.names:
                path = f"{base}.{alias.name}".split(".") if base else alias.name.split(".")
                if path[0] not in ("", "syncprims", "_syncprims_c10d"):
                    theirs.add(alias.asname or alias.name.partition(".")[0])
                    found |= {".".join(path)} if any(map(is_private, path)) else set()
    for node in ast.walk(parsed(module)):
        of, name = "", ""
        if isinstance(node, ast.Attribute):
            of, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            given = node.args[1]
            reads = ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr")
            if reads and isinstance(given, ast.Constant):
                of, name = ast.unparse(node.args[0]), str(given.value)
        if not is_private(name) or {f"{of}.{name}", name} & PUBLIC or of in ("self", "cls"):
            continue
        if name not in defined_in(part(module)) or of.partition(".")[0] in theirs:
            found.add(f"{of}.{name}")
    return found


def test_a_private_name_of_another_package_is_read_through_a_table() -> None:
    found = {module: foreign_reads(module) for module in SOURCES}
    wrong = {m: read for m, read in found.items() if read and m not in WITHOUT_TABLE}
    assert wrong == {}


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        module
        for module in SOURCES
        if part(module) not in ("testing", "training", "accelerate")
        and "os.environ" in code(module)
    }
    # The command line passes its own environment on to the ranks that it starts.
    assert readers == {"syncprims._world.runtime", "syncprims.cli"}
    assert not [module for module in SOURCES if "getenv" in code(module)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_file_of_the_code_that_does_not_exist(page: Path) -> None:
    text = page.read_text()
    known = set(re.findall("<!-- file: (.*?) -->", text))  # what its reader writes
    known |= {test.name for test in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`([\w/.-]+\.py)`", text)) - known
    named |= set(re.findall(r"`((?:syncprims|backends|tests)/[\w/.]*)`", text))
    assert [name for name in named if not (ROOT / name).exists()] == []
