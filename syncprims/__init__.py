"""Synchronization primitives for distributed training scripts, with interchangeable backends.

Nothing happens on import, not even the import of the rest: the first name that is asked for loads
it. The first primitive starts the world from the environment; which backend it runs on is chosen by
``SYNCPRIMS_BACKEND``.
"""

from __future__ import annotations

TYPE_CHECKING = False  # to type checkers, as typing's, which is slow to import

if TYPE_CHECKING:
    from syncprims._api import *  # noqa: F403

__version__: str  #: the installed release

if not TYPE_CHECKING:  # where every misspelt name would become a str

    def __getattr__(name: str) -> object:
        if name in ("errors", "interface"):  # modules of users, too, as `syncprims.errors`
            from importlib import import_module

            return import_module(f"{__name__}.{name}")
        if name.startswith("_") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from syncprims import _api

        if name == "__version__":
            return _api.version()
        names = globals()
        names.update((public, getattr(_api, public)) for public in ("__all__", *_api.__all__))
        if name not in names:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return names[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
