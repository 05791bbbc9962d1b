"""The arrows run one way, and the package list is the tree."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted(ROOT.glob("syncprims/*.py"))
BACKENDS = sorted(ROOT.glob("backends/*.py"))
TESTING = sorted(ROOT.glob("syncprims/testing/*.py"))
TRACING = sorted(ROOT.glob("syncprims/tracing/*.py"))
COMMANDS = sorted(p for room in ("commands", "doctor") for p in ROOT.glob(f"syncprims/{room}/*.py"))
TRAINING = sorted(ROOT.glob("syncprims/training/**/*.py"))

#: Whom a module may import, lowest first: everything above it is out of reach.
LAYERS: list[set[str]] = [
    {"members"},
    {"errors", "arguments", "kinds", "callsite", "devices", "machine", "version"},
    {"interface", "endings"},
    {"arrays", "pickles"},
    {"environment", "registry", "codec", "reduction", "shares"},
    {"whereabouts", "diagnosis", "notes", "choice"},
    {"waiting"},
    {"rounds", "tracefile"},
    {"traced"},
    {"steps"},
    {"bulk"},
    {"hauling"},
    {"carriage"},
    {"exchange"},
    {"turns"},
    {"group"},
    {"membership"},
    {"world"},
    {"sync", "execution", "trigger", "ranklog"},
    {"output"},
    {"launcher", "tracing"},  # a package, see below
    {"cli"},
    {"__init__", "__main__"},
]


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, also inside functions and for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found |= {f".{base}"} if node.level and base else set()
            found |= (
                {f".{alias.name}" for alias in node.names} if node.level and not base else set()
            )
            found |= {base} if not node.level else set()
            if base == "syncprims":
                found |= {f"syncprims.{alias.name}" for alias in node.names}
    return found


def at_import_time(path: Path) -> set[str]:
    """Return the absolute modules that importing a file imports."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_every_module_of_the_core_has_a_layer() -> None:
    assert {path.stem for path in CORE} | {"tracing"} == set().union(*LAYERS)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_imports_downwards_only(path: Path) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if path.stem in layer)
    beneath: set[str] = set().union(*LAYERS[:level])
    if path.stem == "cli":
        beneath.add("commands")
    for name in imports(path):
        if name.startswith("."):
            assert name[1:].split(".")[0] in beneath, f"{path.stem} imports {name}"
        assert not name.startswith("syncprims"), f"{path.stem} imports {name}: use `from .`"
        assert "backends" not in name, f"{path.stem} imports {name}: ask the registry"


@pytest.mark.parametrize("path", BACKENDS, ids=lambda path: path.stem)
def test_backends_know_the_contract_and_their_siblings(path: Path) -> None:
    siblings = {f".{other.stem}" for other in BACKENDS}
    for name in imports(path):
        if name.startswith("."):
            assert name in siblings
        if name.split(".")[0] == "syncprims":
            known = {"syncprims", "syncprims.errors", "syncprims.interface"}
            assert name in known, f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", TESTING, ids=lambda path: path.stem)
def test_testing_stands_on_the_core_and_knows_no_backend(path: Path) -> None:
    for name in imports(path):
        assert "backends" not in name, f"{path.stem} imports {name}: ask the registry"
    heavy = {"torch", "numpy", "filelock"}
    assert not at_import_time(path) & heavy
    assert "pytest" not in at_import_time(path) or path.stem in ("plugin", "marked")


@pytest.mark.parametrize("path", TRACING, ids=lambda path: path.stem)
def test_tracing_reads_what_the_recorder_has_written_and_knows_no_world(path: Path) -> None:
    for name in imports(path):
        if name.startswith("syncprims."):
            assert name.split(".")[1] in ("errors", "members", "tracefile"), (
                f"{path.stem} imports {name}"
            )
    drawing = {"rich", "matplotlib", "torch", "filelock"}
    assert not at_import_time(path) & drawing
    assert path.stem not in ("command", "__init__") or "numpy" not in at_import_time(path)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_commands_stand_on_the_core_and_know_no_backend(path: Path) -> None:
    for name in imports(path):
        assert "backends" not in name, f"{path.stem} imports {name}: ask the registry"
        assert path.parent.name == "commands" or "commands" not in name, f"{path} imports {name}"
    assert not at_import_time(path) & {"torch", "numpy", "filelock", "yaml"}


def test_only_the_command_line_imports_commands() -> None:
    for path in (*CORE, *BACKENDS, *TESTING, *TRAINING):
        found = {
            name for name in imports(path) if name.split(".")[1:2] in (["commands"], ["doctor"])
        }
        assert not found or path.stem == "cli", f"{path} imports {found}"


def test_nobody_imports_testing() -> None:
    for path in CORE + BACKENDS + COMMANDS:
        assert not any("testing" in name for name in imports(path)), path


def test_the_environment_is_read_in_one_place() -> None:
    readers = {path.stem for path in CORE + BACKENDS if "os.environ" in _code(path)}
    # The command line hands its own environment on to the ranks it starts.
    assert readers == {"world", "cli"}
    assert not any("os.environ" in _code(path) for path in COMMANDS)
    assert not any("getenv" in _code(path) for path in CORE + BACKENDS + COMMANDS)


def test_mutable_state_lives_in_world_only() -> None:
    keepers = {
        path.stem
        for path in CORE + BACKENDS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    }
    assert not keepers
    assert "_state = _State(os.environ, _make)" in (ROOT / "syncprims/world.py").read_text()


def test_heavy_libraries_are_imported_only_in_the_rooms_made_for_them() -> None:
    heavy = {"torch", "numpy", "filelock", "safetensors", "tqdm"}
    rooms = {path.stem: at_import_time(path) & heavy for path in CORE + BACKENDS}
    assert {stem: found for stem, found in rooms.items() if found} == {
        "file_lock": {"filelock"},
        "census": {"torch"},
        "stores": {"torch"},
        "default_group": {"torch"},
        "engines": {"numpy", "torch"},
        "torch_dist": {"torch"},
    }


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_training_knows_the_public_primitives_and_torch(path: Path) -> None:
    for name in imports(path):
        if name.startswith("."):
            assert name[1:].split(".")[0] in {p.stem for p in path.parent.iterdir()}
        top, _, rest = name.partition(".")
        # A name of the package's own, the errors, or what a type is called.
        assert top != "syncprims" or rest.split(".")[0] not in ("backends", "testing", "group")
        known = {"syncprims", "torch", "numpy", "safetensors", "tqdm", "xxhash", ""}
        assert top in known | sys.stdlib_module_names


def test_the_package_list_is_the_tree() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent for p in ROOT.glob("syncprims/**/*.py")} | {ROOT / "backends"}
    packages = {
        "syncprims.backends" if folder.name == "backends" else
        ".".join(folder.relative_to(ROOT).parts)
        for folder in folders
    }  # fmt: skip
    assert set(tool["packages"]) == packages
    assert tool["package-dir"] == {"syncprims.backends": "backends"}
    assert (ROOT / "syncprims" / "py.typed").exists()


def test_no_module_has_grown_into_two() -> None:
    every = CORE + BACKENDS + TESTING + TRACING + COMMANDS
    sizes = {path.name: len(path.read_text().splitlines()) for path in every}
    assert not {name: size for name, size in sizes.items() if size > 400}


def _code(path: Path) -> str:
    """Return a module's code without its docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0].value = ast.Constant("")
    return ast.unparse(tree)
