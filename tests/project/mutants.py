"""Change the library in one place at a time, and print the changes that no test notices.

``.venv/bin/python tests/project/mutants.py syncprims/_protocol tests/protocol --most 40 --seed 1``
tries 40 changes of the code in a file or folder with the tests in the others, in a copy of the
checkout. It is run by hand: each change costs a run of these tests, until the first that fails. A
change that survives is a test that is missing, or code that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OPERATORS: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
Change = tuple[int, str, Callable[[], None]]


def changes(tree: ast.Module) -> Generator[Change]:
    """Yield the line, the description and the act of each change of a module."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
            yield node.lineno, "another comparison", _setter(node, "ops", [_other(node.ops[0])])
        elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _OPERATORS:
            yield node.lineno, "another operator", _setter(node, "op", _other(node.op))
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield node.lineno, "the opposite condition", _setter(node, "test", negated)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.lineno, f"{node.value + 1}", _setter(node, "value", node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node.lineno, f"{not node.value}", _setter(node, "value", not node.value)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            for at, line in enumerate(block if isinstance(block, list) else ()):
                is_act = isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
                if is_act or isinstance(line, ast.Raise | ast.AugAssign):
                    yield line.lineno, "without this line", _setter(block, at, ast.Pass())


def _code(node: ast.AST) -> Generator[ast.AST]:
    """Yield all nodes that run: no annotation, and nothing for the type checkers alone."""
    yield node
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.AST):
                yield from _code(child)


def _other(operator: ast.AST) -> ast.AST:
    other: ast.AST = _OPERATORS[type(operator)]()
    return other


def _setter(owner: object, name: str | int, value: object) -> Callable[[], None]:
    def change() -> None:
        if isinstance(owner, list):
            owner[int(name)] = value
        else:
            setattr(owner, str(name), value)

    return change


def passes(copy: Path, tests: list[str], most: float) -> bool:
    """Return whether the tests pass in the copy, within `most` seconds."""
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:randomly"]
    line += ["-p", "no:cacheprovider", "-m", "not soak and not launchers", *tests]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    quiet = subprocess.DEVNULL
    run = subprocess.Popen(
        line, cwd=copy, env=environ, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        return run.wait(most) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def main() -> int:
    """Try the changes that the command line asks for; return how many survive, at most 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("code", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    code = ROOT / options.code
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    found = [
        (file, number)
        for file in files
        for number, _ in enumerate(changes(ast.parse(file.read_text())))
    ]
    chosen = random.Random(options.seed).sample(found, min(options.most, len(found)))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "build", "*.egg-info")
        shutil.copytree(ROOT, copy, ignore=ignore)
        (copy / "syncprims" / "backends").symlink_to("../backends")  # as it is installed
        begin = time.monotonic()
        if not passes(copy, options.tests, 3600):
            parser.error("these tests fail without a change")
        most = 3 * (time.monotonic() - begin) + 60
        for file, number in sorted(chosen):
            tree, place = ast.parse(file.read_text()), copy / file.relative_to(ROOT)
            line, what, change = list(changes(tree))[number]
            change()
            place.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            survives = passes(copy, options.tests, most)
            shutil.copy(file, place)
            survivors += survives
            state = "SURVIVES" if survives else "is found"
            print(f"{state}  {file.relative_to(ROOT)}:{line}: {what}", flush=True)
    print(f"{survivors} of {len(chosen)} changes survive")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
