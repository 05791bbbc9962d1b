"""Accelerate's installed test scripts, with `syncprims.accelerate` in their import lines."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^(\s*)(from|import) accelerate\b", re.MULTILINE)


def installed() -> Path | None:
    """Return the folder of Accelerate, without importing it."""
    spec = find_spec("accelerate")
    # A folder of tests has the same name, and no file of its own.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def port(source: str) -> str:
    """Return a script of Accelerate's with other import lines."""
    ported = _IMPORT.sub(r"\1\2 syncprims.accelerate", source)
    ported = ported.replace('"accelerate.accelerator"', '"syncprims"')  # a logger
    return ported.replace("syncprims.accelerate.test_utils", "accelerate_test_utils")


def load(name: str) -> types.ModuleType:
    """Return the installed script `name`, ported, as a module."""
    folder = installed()
    assert folder is not None
    _provide_helpers(folder)
    return _run(f"ported_{name.replace('/', '_')}", folder / "test_utils/scripts" / f"{name}.py")


def _run(name: str, path: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(port(path.read_text()), str(path), "exec"), vars(module))
    return module


def _provide_helpers(folder: Path) -> None:
    """Make what the scripts import from Accelerate's own test helpers."""
    if "accelerate_test_utils" in sys.modules:
        return
    import pytest
    import torch

    from syncprims.accelerate.utils import gather

    def are_the_same_tensors(tensor: Any) -> bool:
        rows = gather(tensor[None].clone())
        return all(torch.equal(row, tensor.cpu()) for row in rows.cpu())

    @contextmanager
    def assert_exception(kind: type[Exception], text: str | None = None) -> Generator[None]:
        with pytest.raises(kind, match=text):
            yield

    training = _run("accelerate_test_utils_training", folder / "test_utils/training.py")
    helpers: Any = types.ModuleType("accelerate_test_utils")
    helpers.are_the_same_tensors = are_the_same_tensors
    helpers.torch_device = "cpu"
    helpers.RegressionDataset = training.RegressionDataset
    helpers.RegressionModel = training.RegressionModel
    helpers.require_bnb = lambda function: function
    testing: Any = types.ModuleType("accelerate_test_utils.testing")
    testing.assert_exception = assert_exception
    sys.modules |= {"accelerate_test_utils": helpers, "accelerate_test_utils.testing": testing}
    for name in ("datasets", "evaluate"):  # imported by a script, for functions that are left out
        if find_spec(name) is None and name not in sys.modules:
            stub: Any = types.ModuleType(name)
            stub.load_dataset = stub.load = None
            sys.modules[name] = stub


def outcomes(calls: list[tuple[str, Callable[[], Any]]]) -> dict[str, str]:
    """Make the calls, and return what each raised: empty if it passed."""
    import traceback

    found: dict[str, str] = {}
    for name, call in calls:
        try:
            call()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()[-1500:]
    return found
