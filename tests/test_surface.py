"""The public names and signatures are those that were promised."""

from __future__ import annotations

import difflib

import pytest

pytest.importorskip("torch")  # syncprims.training is part of it
from surface import GOLDEN, surface


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
        "is meant,\nrun `python tests/surface.py --write` and say it in docs/changelog.md."
    )


def test_it_shows_functions_classes_and_their_members() -> None:
    lines = surface().splitlines()
    assert "class SyncTimeout(SyncError, TimeoutError)" in lines
    assert any(line.startswith("barrier(name: str | None = None") for line in lines)
    assert "    world_size: property" in lines
    assert "    check(self) -> bool" in lines
