"""Patches that ranks make: each is its rank's own, and none outlives the world.

Those of `unittest.mock` and of pytest's `monkeypatch` are noted with what was there before. So they
can be undone and made again as the turn passes, and whatever is left at the end is undone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

from .private_names import NAMES
from .rank_threads import Replacement

_NONE = object()  # there is no such value

#: By the owner's id and the name: the owner, whether the name is that of an item, and the value
#: before.
Patched = dict[tuple[int, Any], tuple[Any, bool, Any]]
_patched: list[Patched] = [{}]  # last, those of the rank that has the turn
_own_environ = [False]  # of the same worlds


def lift() -> list[tuple[Any, Any, bool, Any, Any]]:
    """Undo all patches of the rank that has the turn, and return what :func:`restore` takes."""
    lifted = [
        (owner, name, item, before, _get(owner, name, item))
        for (_, name), (owner, item, before) in _patched[-1].items()
    ]
    _patched[-1] = {}
    with contextlib.ExitStack() as undo:  # the last one first, and all, also if one raises
        for owner, name, item, before, _ in lifted:
            undo.callback(_put, owner, name, item, before)
    return lifted


def restore(lifted: list[tuple[Any, Any, bool, Any, Any]]) -> None:
    """Make patches again."""
    for owner, name, item, before, value in lifted:
        _patched[-1][id(owner), name] = owner, item, before
        _put(owner, name, item, value)


@contextlib.contextmanager
def undone_at_end(*, own_environ: bool) -> Generator[None]:
    """Undo, at the end of the block, what ranks have patched in it.

    With `own_environ`, each rank has an ``os.environ`` of its own, which ends with it.

    A patch that has ended stays noted: where ranks share one, what it has put back may be that of
    another rank.
    """
    _patched.append({})
    _own_environ.append(own_environ)
    if "unittest.mock" in sys.modules:  # what a rank has only started is not to be stopped later
        patch, active = NAMES["_patch"], NAMES["_patch._active_patches"]
        _note(patch, "_active_patches", False, active)
        NAMES.set(patch, "_patch._active_patches", [])
    with _noted():
        try:
            yield
        finally:
            try:
                lift()
            finally:
                _patched.pop()
                _own_environ.pop()


def _get(owner: Any, name: Any, item: bool) -> Any:
    if item:
        return owner.get(name, _NONE)
    own = getattr(owner, "__dict__", None)  # the value itself, and no descriptor's
    return getattr(owner, name, _NONE) if own is None else own.get(name, _NONE)


def _put(owner: Any, name: Any, item: bool, value: Any) -> None:
    if _get(owner, name, item) is value:
        pass
    elif value is not _NONE:
        owner.__setitem__(name, value) if item else setattr(owner, name, value)
    else:
        owner.__delitem__(name) if item else delattr(owner, name)


def _note(owner: object, name: object, item: bool, before: object) -> None:
    if owner is not os.environ or not _own_environ[-1]:
        _patched[-1].setdefault((id(owner), name), (owner, item, before))


def _find_functions() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = []
    if "unittest.mock" in sys.modules:
        enter, patch_dict = NAMES["_patch"].__enter__, NAMES["_patch_dict._patch_dict"]

        def enter_noted(patch: Any) -> Any:
            owner = patch.getter()
            before = _get(owner, patch.attribute, False)
            value = enter(patch)
            _note(owner, patch.attribute, False, before)
            return value

        def patch_noted(patch: Any) -> None:
            patch_dict(patch)
            # Not the others, which others may change meanwhile, as an import does in sys.modules.
            before = NAMES.of(patch, "_patch_dict._original")
            for key in {**before, **patch.values} if patch.clear else patch.values:
                _note(patch.in_dict, key, True, before.get(key, _NONE))

        found += [(NAMES["_patch"], "__enter__", enter_noted)]
        found += [(NAMES["_patch_dict"], "_patch_dict", patch_noted)]
    pytests = sys.modules.get("_pytest.monkeypatch")
    if pytests is not None:
        found += [_noting(pytests, name) for name in ("setattr", "delattr", "setitem", "delitem")]
    return found


def _noting(module: Any, name: str) -> tuple[Any, str, Callable[..., None]]:
    function, item = getattr(module.MonkeyPatch, name), name.endswith("item")
    missing = getattr(module, "notset", None) or module.NOTSET  # its name in older versions, or now

    def patch(monkeypatch: Any, *args: Any, **named: Any) -> None:
        made = NAMES.of(monkeypatch, "MonkeyPatch._setitem" if item else "MonkeyPatch._setattr")
        count = len(made)
        function(monkeypatch, *args, **named)
        for owner, of, before in made[count:]:
            _note(owner, of, item, _NONE if before is missing else before)

    return module.MonkeyPatch, name, patch


_noted = Replacement(_find_functions)
