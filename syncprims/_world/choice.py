"""Which world would start: a pure function of the arguments and the environment.

Never of what happens to be importable here, since two ranks must not choose differently. Nothing
falls back in silence: what contradicts itself is an error that names both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import ConfigurationError, SyncError

from .environment import claims_of_size
from .registry import backend_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncprims.interface import Backend, Topology


class Choice(NamedTuple):
    """A backend, what decided it, and the place of this process."""

    backend: str
    chosen_by: str
    place: Topology


def choose(
    environ: Mapping[str, str],
    asked: str | None,
    *,
    grouped: bool,
    find_place: Callable[[], Topology],
) -> Choice:
    """Return the backend for `environ`, `asked` for by argument; no backend is imported.

    `grouped` says that a ``torch.distributed`` group is initialized already. `find_place` is asked
    for this process's place after what contradicts itself without it has been refused.

    :raises ConfigurationError: naming both sides of a contradiction.
    """
    name, chosen_by = _named(environ, asked, grouped)
    if name == "single":
        _refuse_lonely(environ, chosen_by)
    place = find_place()
    if name == "auto":
        name = "torch" if place.world_size > 1 else "single"
        chosen_by += f", which takes {name!r} for world_size={place.world_size}"
    return Choice(name, chosen_by, place)


def class_of(choice: Choice) -> type[Backend]:
    """Return the class of the chosen backend.

    :raises ConfigurationError: if nobody knows it, or it cannot join as many hosts as there are.
    :raises BackendUnavailable: if it cannot be imported.
    """
    try:
        cls = backend_class(choice.backend)
    except SyncError as error:
        error.args = (f"{error} (chosen by {choice.chosen_by})",)
        raise
    place = choice.place
    if place.num_nodes > 1 and not cls.spans_hosts:
        raise ConfigurationError(
            f"backend {choice.backend!r} (chosen by {choice.chosen_by}) joins the ranks of one "
            f"host, and {place.launcher} started {place.num_nodes} nodes; choose one that spans "
            f"hosts"
        )
    return cls


def _named(environ: Mapping[str, str], asked: str | None, grouped: bool) -> tuple[str, str]:
    """Return the name of the backend, perhaps ``auto``, and what decided it."""
    named = environ.get("SYNCPRIMS_BACKEND") or None
    if asked not in (None, "auto") and named not in (None, "auto", asked):
        raise ConfigurationError(
            f"init({asked!r}) contradicts SYNCPRIMS_BACKEND={named}; drop one of them"
        )
    if asked not in (None, "auto"):
        assert asked is not None
        return asked, f"init({asked!r})"
    if named not in (None, "auto"):
        assert named is not None
        return named, f"SYNCPRIMS_BACKEND={named}"
    if grouped:
        return "torch", "the torch.distributed group that is initialized already"
    return "auto", f"SYNCPRIMS_BACKEND={named}" if named else "the default, auto"


def _refuse_lonely(environ: Mapping[str, str], chosen_by: str) -> None:
    """Refuse a world of one where the environment claims more."""
    claims = claims_of_size(environ)
    if claims:
        shown = " and ".join(f"{name}={size}" for name, size in claims.items())
        raise ConfigurationError(
            f"backend 'single' (chosen by {chosen_by}) is a world of one, and the environment says "
            f"{shown}; choose another backend, or unset {' and '.join(claims)}"
        )
