"""Make the import of torch cheap in every Python that a test starts. Its site module imports this.

An import of torch makes objects that live until the process ends. The collector would visit all of
them several times, during the import and at the end: a third of the time of a short script.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class _WithoutCollections:
    """Finds some modules, to import them without collections and to exempt what they make."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_without_collections(module: ModuleType) -> None:
            enabled = gc.isenabled()
            gc.disable()
            try:
                run(module)
            finally:
                gc.freeze()
                if enabled:
                    gc.enable()

        spec.loader.exec_module = run_without_collections  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WithoutCollections("torch", "torch._dynamo"))
