"""The public names and signatures equal the frozen ones."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re

import pytest

pytest.importorskip("torch")  # syncprims.training is part of it
from support.pages import ROOT
from support.surface import GOLDEN, MODULES, surface


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
        "is meant,\nrun `python -m support.surface --write` and say it in docs/changelog.md."
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
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = set(re.findall(r"^::: syncprims\.(?:\w+\.)*(\w+)$", pages, re.MULTILINE))
    public = set(re.findall(r"^(?:class )?([A-Za-z]\w*)", surface(), re.MULTILINE))
    assert sorted(public - shown) == []
