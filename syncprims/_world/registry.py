"""Which backend runs the world. Only this module loads what stands above the core, by its name.

The choice depends on the arguments and the environment alone, never on what happens to be
importable here, since two ranks must not choose differently. There is no silent fallback: a
contradiction is an error that names both sides.

A table of strings comes first, so that only the chosen backend is imported. Entry points of the
group ``syncprims.backends`` are read only for a name that the table does not have: at 512 ranks on
a shared disk, reading them at every start would open very many small files. Rooms that offer
something to every world stand in a table, too: the core imports none of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from syncprims.errors import BackendUnavailable, ConfigurationError, SyncError
from syncprims.interface import Backend, Settings, Topology

from .launchers import detect, find_spread, find_world_sizes
from .settings import read_settings

#: `syncprims.backends` is the folder `backends` of the repository.
_BUILT_IN = {
    "file": "syncprims.backends.file.backend:FileBackend",
    "gloo": "syncprims.backends.torch.backend:GlooBackend",
    "nccl": "syncprims.backends.torch.backend:NcclBackend",
    "single": "syncprims.backends.single:SingleBackend",
    "threads": "syncprims.backends.threads:ThreadBackend",
    "torch": "syncprims.backends.torch.backend:TorchBackend",
}
#: What rooms offer to a world.
_OFFERED = {
    "process group": "syncprims.c10d:open_default_group",
    "recorder": "syncprims.tracing.recorder:Recorder",
}
#: Backends that are built on torch. On each host, their ranks meet through files.
BY_TORCH = ("gloo", "nccl", "torch")


class Choice(NamedTuple):
    """A backend, what decided it, and this process's topology."""

    backend: str
    chosen_by: str
    topology: Topology
    spread: str = ""  #: what says that the ranks are on several hosts, if anything does

    def load(self) -> type[Backend]:
        """Return the class of the backend.

        :raises ConfigurationError: if no such backend exists, or it cannot join so many hosts.
        :raises BackendUnavailable: if it cannot be imported.
        """
        try:
            cls = load_backend(self.backend)
        except SyncError as error:
            error.args = (f"{error} (chosen by {self.chosen_by})",)
            raise
        if self.spread and not cls.spans_hosts:
            raise ConfigurationError(
                f"backend {self.backend!r} (chosen by {self.chosen_by}) joins the ranks of one "
                f"host, and {self.spread}; choose one that spans hosts"
            )
        return cls


def choose_backend(
    environ: Mapping[str, str],
    asked: str | None,
    *,
    grouped: bool,
    find_topology: Callable[[], Topology],
) -> Choice:
    """Return the backend for `environ` and the argument `asked`; no backend is imported.

    `grouped` says that a ``torch.distributed`` group is initialized already. `find_topology` is
    called after the contradictions that need no topology have been raised.

    :raises ConfigurationError: naming both sides of a contradiction.
    """
    name, chosen_by = _choose_name(environ, asked, grouped)
    if name == "single" and (sizes := find_world_sizes(environ)):
        shown = " and ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"backend 'single' (chosen by {chosen_by}) is a world of one, and the environment says "
            f"{shown}; choose another backend, or unset {' and '.join(sizes)}"
        )
    topology = find_topology()
    if name == "auto":
        name = "torch" if topology.world_size > 1 else "single"
        chosen_by += f", which takes {name!r} for world_size={topology.world_size}"
    return Choice(name, chosen_by, topology, find_spread(environ, topology))


def load_backend(name: str) -> type[Backend]:
    """Return the class of backend `name`.

    :raises ConfigurationError: if no backend has this name.
    :raises BackendUnavailable: if it has one that cannot be imported.
    """
    target = _BUILT_IN.get(name) or _find_plug_in(name)
    try:
        found = _load(target)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported from {target}: {error}. {_cure(target, error)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendUnavailable(f"backend {name!r}: {target} is not a syncprims Backend class")
    return found


def load_offered(name: str) -> Any:
    """Return what a room offers to a world: how to open a ``process group``, or a ``recorder``.

    :raises ImportError: if the room, or what it needs, is not installed.
    """
    return _load(_OFFERED[name])


def find_end_recorder(environ: Mapping[str, str]) -> tuple[type[Backend], Topology, Settings]:
    """Return the class that records how the rank with these variables ends, and its arguments.

    Torch is not loaded.

    :raises SyncError: if such a rank could not join.
    """
    choice = choose_backend(environ, None, grouped=False, find_topology=lambda: detect(environ))
    recorder = load_backend("file" if choice.backend in BY_TORCH else choice.backend)
    return recorder, choice.topology, read_settings(environ)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _choose_name(environ: Mapping[str, str], asked: str | None, grouped: bool) -> tuple[str, str]:
    """Return the name of the backend, perhaps ``auto``, and what decided it."""
    variable = environ.get("SYNCPRIMS_BACKEND") or None
    source = f"SYNCPRIMS_BACKEND={variable}"
    named = None if variable == "auto" else variable
    if asked is not None and asked != "auto":
        if named not in (None, asked):
            is_launched = "SYNCPRIMS_RESTART" in environ
            cure = f"`syncprims run` has set that; start it with --backend {asked}"
            raise ConfigurationError(
                f"init({asked!r}) contradicts {source}: {cure if is_launched else 'change one'}, "
                f"or call init() without a backend"
            )
        return asked, f"init({asked!r})"
    if named is not None:
        return named, source
    if grouped:
        return "torch", "the torch.distributed group that is initialized already"
    return "auto", source if variable else "the default, auto"


def _find_plug_in(name: str) -> str:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    points = entry_points(group="syncprims.backends")
    found = sorted({point.value for point in points if point.name == name})
    if not found:
        known = sorted({*_BUILT_IN, *(point.name for point in points)} - {"threads"})  # for tests
        raise ConfigurationError(
            f"there is no backend named {name!r}; known are: {', '.join(known)}. "
            f"Set SYNCPRIMS_BACKEND to one of them, or install the package that provides {name!r}"
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"several packages provide a backend named {name!r}: {', '.join(found)}; "
            f"uninstall all but one"
        )
    return found[0]


def _cure(target: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "Install torch, or set SYNCPRIMS_BACKEND=file on one host"
    if sys.platform == "win32":
        return "It needs Linux or macOS; on Windows, use WSL, or SYNCPRIMS_BACKEND=single"
    if getattr(sys, "frozen", False):
        return (
            "Backends are imported by name, and a frozen program has to include them: "
            "pyinstaller --collect-submodules syncprims --copy-metadata syncprims"
        )
    if target.startswith("syncprims."):
        return (
            "A bare checkout has no installed backends: run `pip install -e .` in it, and start "
            "Python outside of it if syncprims is installed elsewhere"
        )
    return "Reinstall the package that provides it"
