"""A backend's name becomes its class. The only door to ``syncprims.backends``.

A table of strings comes first, so that nothing is imported before it is chosen. Entry points of the
group ``syncprims.backends`` are read only for a name the table does not know: at 512 ranks on a
shared disk, reading them at every start would be a storm of small files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.interface import Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "syncprims.backends"

_BUILT_IN = {
    "file": "syncprims.backends.file.backend:FileBackend",
    "gloo": "syncprims.backends.torch.backend:GlooBackend",
    "nccl": "syncprims.backends.torch.backend:NcclBackend",
    "single": "syncprims.backends.single:SingleBackend",
    "threads": "syncprims.backends.threads:ThreadBackend",
    "torch": "syncprims.backends.torch.backend:TorchBackend",
}


def backend_class(name: str) -> type[Backend]:
    """Return the class of backend `name`.

    :raises ConfigurationError: if nobody knows the name.
    :raises BackendUnavailable: if it is known and cannot be imported.
    """
    target = _BUILT_IN.get(name)
    if target is None:
        target = _plug_in(name)
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported from {target}: {error}. {_cure(module, error)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendUnavailable(f"backend {name!r}: {target} is not a syncprims Backend class")
    return found


def known_backends() -> list[str]:
    """Return the names of all backends, built in and installed."""
    return sorted({*_BUILT_IN, *(point.name for point in _entry_points())})


def _plug_in(name: str) -> str:
    found = [point.value for point in _entry_points() if point.name == name]
    if not found:
        raise ConfigurationError(
            f"there is no backend named {name!r}; known are: {', '.join(known_backends())}. "
            f"Set SYNCPRIMS_BACKEND to one of them, or install the package that provides {name!r}"
        )
    if len(set(found)) > 1:
        raise ConfigurationError(
            f"several packages provide a backend named {name!r}: {', '.join(sorted(set(found)))}; "
            f"uninstall all but one"
        )
    return found[0]


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return list(entry_points(group=ENTRY_POINTS))


def _cure(module: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "Install torch, or set SYNCPRIMS_BACKEND=file on one host"
    if module.startswith("syncprims."):
        return (
            "A bare checkout has no installed backends: run `pip install -e .` in it, and start "
            "Python outside of it if syncprims is installed elsewhere"
        )
    return "Reinstall the package that provides it"
