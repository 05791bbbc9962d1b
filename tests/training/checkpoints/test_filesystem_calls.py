"""Every call on the file system goes through the module with fault injection."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from support import ROOT
from support.file_faults import CALLS

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = ROOT / "syncprims" / "training" / "checkpoints"
#: What reads and writes no file.
HARMLESS = {"fspath", "path", "PathLike", "curdir", "pardir", "cpu_count", "stat_result"}
ON_WINDOWS = {"lseek", "replace", "SEEK_SET"}


def names_used(path: Path) -> set[str]:
    """Return the functions and constants of `os` in a module, and what else opens files."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"open"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "os" else set()
            found |= {"Path"} if node.value.id == "Path" else set()
    return {name for name in found if not name.startswith(("O_", "POSIX_"))}


def test_one_module_touches_files_by_calls_that_tests_see() -> None:
    for path in PACKAGE.glob("*.py"):
        allowed = {*HARMLESS, *CALLS, *ON_WINDOWS} if path.name == "filesystem.py" else HARMLESS
        assert names_used(path) <= allowed, path.name
