"""Private names of other packages that a room reads, in one table per room.

Other packages may rename what is private in any release. So each name stands in the module
`private_names` of its room, with its reason, and is read through that table. Then a name that is
gone makes an error that says which one it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from syncprims.errors import BackendUnavailable

_REQUIRED: Any = object()


class OptionalName(NamedTuple):
    """Why a room reads a name that some versions lack, and what happens there."""

    why: str
    without: str
    since: str = ""  #: the first version that is known to have it; empty: all that we allow
    until: str = ""  #: the last one


class _Name(NamedTuple):
    module: str  # that has it
    path: str  # its place in the module, with dots
    why: str
    without: str = ""  # empty: an error
    since: str = ""
    until: str = ""


class PrivateNames:
    """The table of a room: by module and names, what the room does by these."""

    def __init__(self, room: str, names: Mapping[str, Mapping[str, str | OptionalName]]) -> None:
        self.room: str = room
        self.names: dict[str, _Name] = {
            path: _Name(module, path, *((why,) if isinstance(why, str) else why))
            for module, of_module in names.items()
            for paths, why in of_module.items()
            for path in paths.split()
        }

    def __getitem__(self, path: str) -> Any:
        """Return what stands at this path, or None where the table says what happens without.

        :raises BackendUnavailable: if nothing stands there, and the room needs it.
        """
        name = self.names[path]
        try:
            return attrgetter(path)(import_module(name.module))
        except (ImportError, AttributeError):
            return self._missing(name)

    def of(self, thing: Any, path: str, default: Any = _REQUIRED) -> Any:
        """Return an attribute of an object; `default` if objects of its kind have none.

        :raises BackendUnavailable: if the class of the table has none either.
        """
        name = self.names[path]
        found = getattr(thing, path.rpartition(".")[2], _REQUIRED)
        if found is not _REQUIRED:
            return found
        return self._missing(name) if default is _REQUIRED or not _has_existed(name) else default

    def set(self, thing: Any, path: str, value: object) -> None:
        """Set an attribute of an object.

        :raises BackendUnavailable: if its class has none.
        """
        self.of(thing, path, None)
        setattr(thing, path.rpartition(".")[2], value)

    def check(self) -> None:
        """Check all names of modules, without importing them.

        :raises BackendUnavailable: if one is missing that the room needs.
        """
        for name in self.names.values():
            if not _has_existed(name):
                self._missing(name)

    def report(self) -> list[str]:
        """Return a line for each name that this version should have and has not, as `check`."""
        missing = (name for name in self.names.values() if not _exists(name))
        return [self._describe(name) for name in missing if _is_expected(name)]

    def _missing(self, name: _Name) -> None:
        if not name.without:
            cure = f"use an older {_owner(name)[0]}, or a newer syncprims"
            raise BackendUnavailable(f"{self._describe(name)}; {cure}. The rest of syncprims works")

    def _describe(self, name: _Name) -> str:
        there = f"{' '.join(_owner(name))} has no {name.module}.{name.path}"
        text = f"{there}, by which syncprims.{self.room} {name.why}"
        return f"{text}: without it, {name.without}" if name.without else text


def _is_expected(name: _Name) -> bool:
    import re

    version, since, until = (
        [int(part) for part in re.findall(r"\d+", text)[:2]]
        for text in (_owner(name)[1], name.since, name.until)
    )
    return version >= since and (not until or version <= until)


def installed_tables() -> list[PrivateNames]:
    """Return the tables of all rooms, without importing the rooms."""
    import runpy
    from importlib.util import find_spec
    from pathlib import Path

    packages = [find_spec(name) for name in ("syncprims", "syncprims.backends")]
    places = [p for one in packages if one for p in one.submodule_search_locations or ()]
    files = {str(file) for place in places for file in Path(place).rglob("private_names.py")}
    return [runpy.run_path(file)["NAMES"] for file in sorted(files)]


def _owner(name: _Name) -> tuple[str, str]:
    import platform  # slow to import, as the other one is
    from importlib import metadata

    top = name.module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return "Python", platform.python_version()
    return top.lstrip("_"), metadata.version(top.lstrip("_"))


def _exists(name: _Name) -> bool:
    """Return whether its module has a name; where the package is not installed, none is missing.

    The text of a module answers if it was not imported, and for what only its objects have the code
    of a class.
    """
    *owners, last = name.path.split(".")
    owner: Any = sys.modules.get(name.module)
    if owner is None:
        return _stands_in_file(name.module, last)
    for part in owners:
        owner = getattr(owner, part, None)
    if hasattr(owner, last) or not isinstance(owner, type):
        return hasattr(owner, last)
    methods = [one for base in owner.__mro__ for one in vars(base).values()]
    return any(last in one.__code__.co_names for one in methods if hasattr(one, "__code__"))


_has_existed = functools.cache(_exists)  # a look takes up to a millisecond


def _stands_in_file(module: str, word: str) -> bool:
    import re
    from importlib.util import find_spec
    from pathlib import Path

    top, *parts = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None or parts[:1] == ["_C"]:  # nothing to read
        return True
    path = Path(spec.origin).parent.joinpath(*parts) if parts else Path(spec.origin)
    files = [path, path.with_suffix(".py"), path / "__init__.py"]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return any(re.search(rf"\b{re.escape(word)}\b", text) for text in texts)
