"""`import syncprims` imports the standard library only."""

from __future__ import annotations

import sys

import pytest
from support.rank_environment import run_python

FOREIGN = ("torch", "numpy", "filelock", "safetensors", "tqdm", "pytest", "syncprims.backends")


def loaded_after(code: str) -> set[str]:
    probe = f"{code}\nimport sys\nprint(*sys.modules)"
    done = run_python("-c", probe)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_loads_nothing_else() -> None:
    new = loaded_after("import syncprims") - loaded_after("pass")
    assert new - {"__future__"} == {"syncprims"}


@pytest.mark.parametrize("module", ["syncprims._api", "syncprims.cli", "syncprims._world.runtime"])
def test_import_loads_the_standard_library_only(module: str) -> None:
    new = loaded_after(f"import {module}") - loaded_after("pass")
    own = {name for name in new if name.split(".")[0] == "syncprims"}
    # Python 3.15 has a module that is not in its list.
    standard = sys.stdlib_module_names | {"_missing_stdlib_info"}
    outsiders = {name.split(".")[0] for name in new - own} - standard
    assert not outsiders
    assert not set(FOREIGN) & new


def test_a_world_of_one_stays_light() -> None:
    loaded = loaded_after("import syncprims\nsyncprims.barrier()\nsyncprims.all_reduce(1)")
    assert not {"torch", "numpy", "filelock", "tqdm", "importlib.metadata", "socket"} & loaded


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("training", "training"),
        ("accelerate.utils", "training"),
        ("accelerate", "training"),
        ("c10d", "c10d"),
    ],
)
def test_a_package_says_that_it_needs_torch(module: str, package: str) -> None:
    probe = f"import sys\nsys.modules['torch'] = None\nimport syncprims.{module}"
    done = run_python("-c", probe)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"ImportError: syncprims.{package} needs torch: "
        "pip install '.[torch]' in the checkout of syncprims\n"
    )
