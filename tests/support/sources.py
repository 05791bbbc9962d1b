"""The modules of the library, and what they import, without importing them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support import ROOT


def module_of(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "syncprims" else ("syncprims", *parts)
    return ".".join(parts).removesuffix(".__init__")


CORE = [
    "_system", "errors", "interface", "_protocol", "_data", "_world", "_api",
    "backends.single", "backends.threads", "backends.file",
]  # fmt: skip
SOURCES = {
    module_of(path): path
    for path in sorted([*ROOT.glob("syncprims/**/*.py"), *ROOT.glob("backends/**/*.py")])
}


@cache
def count_code(path: Path) -> int:
    """Return how many lines of a file hold code, and not only a comment or docstring."""
    text = path.read_text()
    texts = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and number not in texts for number, line in lines)


def is_of_core(module: str) -> bool:
    """Return whether a module is of the core, which works without every room."""
    return any(is_in(module, f"syncprims.{part}") for part in CORE)


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(SOURCES[module].read_text())


def nodes(module: str, *, at_import_time: bool) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a module: those that importing it runs, or all of them."""
    tree = parsed(module)
    found = tree.body if at_import_time else ast.walk(tree)
    return [node for node in found if isinstance(node, (ast.Import, ast.ImportFrom))]


def names(module: str, node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the modules that a statement imports, by their absolute names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    base = node.module or ""
    if node.level:
        package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
        base = f"{package}.{base}" if base else package
    inner = {f"{base}.{alias.name}" for alias in node.names}
    return {name if name in SOURCES else base for name in inner}


@cache
def imports(module: str, *, at_import_time: bool = False) -> frozenset[str]:
    """Return every module that a module imports, also inside functions, by name, or for types."""
    return frozenset(
        name
        for node in nodes(module, at_import_time=at_import_time)
        for name in names(module, node)
    ).union([] if at_import_time else named_in_calls(module))


def named_in_calls(module: str) -> set[str]:
    """Return the modules that a module imports by ``import_module("...")``."""
    return {
        call.args[0].value
        for call in ast.walk(parsed(module))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith("import_module")
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def is_in(module: str, package: str) -> bool:
    """Return whether a module is this package or inside of it."""
    return module == package or module.startswith(f"{package}.")
