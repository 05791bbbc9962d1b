"""The public names, signatures, flags and variables, as text, one per line, equal the frozen ones.

``cd tests && python -m project.test_public_surface`` freezes the present ones in ``surface.txt``.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import enum
import importlib
import inspect
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT

from syncprims._world.settings import _OURS as VARIABLES
from syncprims.cli import parser

GOLDEN = Path(__file__).with_name("surface.txt")
MODULES = (
    "syncprims",
    "syncprims.who",
    "syncprims.interface",
    "syncprims.testing",
    "syncprims.training",
)
#: The names of others that are served here: torch's, and Accelerate's in its modules.
OF_OTHERS = (
    "syncprims.c10d",
    "syncprims.accelerate",
    "syncprims.accelerate.data_loader",
    "syncprims.accelerate.logging",
    "syncprims.accelerate.state",
    "syncprims.accelerate.tracking",
    "syncprims.accelerate.utils",
)
#: Classes whose instances the library makes: their constructors are no promise.
MADE_BY_THE_LIBRARY = {"Group", "Mark", "PreparedLoader", "Saving", "World"}


def surface() -> str:
    """Return every public name with its signature, and what may be written elsewhere."""
    told: set[type] = set()  # classes are in several modules
    parts = [f"[{name}]\n" + "\n".join(_of_module(name, told)) for name in (*MODULES, *OF_OTHERS)]
    parts.append("[the command]\n" + "\n".join(_flags(parser(), "syncprims")))
    parts.append("[variables]\n" + "\n".join(sorted(VARIABLES)))
    return "\n\n".join(parts) + "\n"


def _flags(command: argparse.ArgumentParser, name: str) -> Generator[str]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, one in action.choices.items():
                yield from _flags(one, f"{name} {word}")
        else:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            yield f"{name} {' '.join(action.option_strings)}{value}".replace("  ", " ")


def _of_module(name: str, told: set[type]) -> Generator[str]:
    module = importlib.import_module(name)
    for public in sorted(getattr(module, "__all__", _offered(module))):
        thing = getattr(module, public)
        if public.startswith("_") or inspect.ismodule(thing) or not _ours(thing):
            continue
        if inspect.isclass(thing):
            lines = _of_class(public, thing)
            yield next(lines)
            # Torch calls what is in its process groups.
            yield from () if thing in told or name == "syncprims.c10d" else lines
            told.add(thing)
        elif callable(thing):
            yield f"{public}{_signature(thing)}"
        else:
            yield f"{public}: {type(thing).__name__}"


def _offered(module: Any) -> set[str]:
    """Return the names that a module defines, or imports in the form ``name as name``."""
    tree = ast.parse(inspect.getsource(module))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    again = {one.name for node in imports for one in node.names if one.asname == one.name}
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    return again | own | {t.id for ts in assigned for t in ts if isinstance(t, ast.Name)}


def _of_class(public: str, cls: type) -> Generator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {public}({bases})" if bases else f"class {public}"
    constructed = _is_own(cls, "__init__") or _is_own(cls, "__new__")
    if constructed and public not in MADE_BY_THE_LIBRARY and not issubclass(cls, enum.Enum):
        yield f"    {public}{_signature(cls)}"
    for name in sorted(dir(cls)):
        if name.startswith(("_", "test_")) or not _is_own(cls, name):
            continue
        found = inspect.getattr_static(cls, name)
        if isinstance(found, (staticmethod, classmethod)):
            yield f"    {type(found).__name__} {name}{_signature(getattr(cls, name))}"
        elif inspect.isfunction(found):
            yield f"    {name}{_signature(found)}"
        elif isinstance(found, property):
            yield f"    {name}: property{' that may be set' if found.fset else ''}"
        else:
            yield f"    {name}"


def _signature(thing: Any) -> str:
    """Return the signature with its annotations as written in the source, on every Python."""
    try:
        text = str(inspect.signature(thing))
    except ValueError:
        return "(...)"
    text = re.sub(r"ForwardRef\((['\"])(.*?)\1.*?\)", r"\2", text)
    return re.sub(r"(: |-> )(['\"])(.*?)\2(?=[,) ]|$)", r"\1\3", text)


def _ours(thing: object) -> bool:
    return str(getattr(thing, "__module__", None) or type(thing).__module__).startswith("syncprims")


def _is_own(cls: type, name: str) -> bool:
    """Return whether `cls` has this name itself or from a base that is not public."""
    for base in cls.__mro__:
        if name in vars(base):
            return _ours(base) and (base is cls or base.__module__ not in MODULES)
    return False


def test_the_public_surface_is_the_frozen_one() -> None:
    frozen, present = GOLDEN.read_text().splitlines(), surface().splitlines()
    diff = [
        line
        for line in difflib.unified_diff(frozen, present, "frozen", "present", n=1, lineterm="")
        if not line.startswith("@@")
    ]
    assert diff == [], (
        "\nThe public surface has changed:\n\n" + "\n".join(diff) + "\n\n"
        "Lines with - were promised to users and are gone; lines with + are new promises. If that "
        "is meant,\nrun `python -m project.test_public_surface` in tests/ and say it in "
        "docs/changelog.md."
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_star_import_gives_the_public_names_and_no_others(module: str) -> None:
    given: dict[str, object] = {}
    exec(f"from {module} import *", given)
    del given["__builtins__"]
    assert sorted(given) == sorted(set(importlib.import_module(module).__all__))
    assert not [name for name, thing in given.items() if inspect.ismodule(thing)]
    (section,) = [s for s in surface().split("\n\n") if s.startswith(f"[{module}]\n")]
    assert set(re.findall(r"^(?:class )?([A-Za-z]\w*)", section, re.MULTILINE)) <= set(given)


def test_every_public_name_is_in_the_reference() -> None:
    sections = surface().split("\n\n")
    library = "\n".join(s for s in sections if s.startswith(tuple(f"[{m}]" for m in MODULES)))
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"^::: syncprims\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    public = set(re.findall(r"^(?:class )?([A-Za-z]\w*)", library, re.MULTILINE))
    assert sorted(public - shown) == []


if __name__ == "__main__":
    GOLDEN.write_text(surface())
