"""Synchronization primitives for distributed training scripts, with interchangeable backends.

Nothing happens on import, not even the import of the rest: the first name that is asked for loads
it. The first primitive starts the world from the environment; which backend it runs on is chosen by
``SYNCPRIMS_BACKEND``.
"""

from __future__ import annotations

TYPE_CHECKING = False  # to type checkers, as typing's, which is slow to import

if TYPE_CHECKING:
    from syncprims._api import *  # noqa: F403

__all__ = [  # noqa: RUF022 - in the order of the reference
    "init", "shutdown", "current", "World", "Topology", "version",
    "get_rank", "get_world_size", "get_local_rank", "get_local_world_size", "get_node_rank",
    "get_num_nodes", "is_main", "is_local_main", "is_last",
    "barrier", "broadcast", "all_gather", "all_reduce", "any_rank", "all_ranks", "assert_same",
    "group", "Group", "main_first", "in_turn",
    "on_main", "on_local_main", "on_last", "on_rank", "on_local_rank", "split",
    "reform", "Change", "hand_over",
    "Trigger", "set_trigger", "check_trigger", "print_main", "progress", "get_logger",
    "SyncError", "Failure", "ConfigurationError", "BackendUnavailable", "CollectiveMismatch",
    "RankMismatch", "SyncTimeout", "PeerLost", "PeerFailed", "Evicted", "EncodingError",
    "WorldClosed", "ForkedProcess", "ConcurrentCall", "CheckpointError", "SharedMemoryError",
    "SyncWarning", "UnequalCallSites",
]  # fmt: skip

__version__: str  #: the installed release

if not TYPE_CHECKING:  # where every misspelt name would become a str

    def __getattr__(name: str) -> object:
        if name in ("errors", "interface"):  # modules of users, too, as `syncprims.errors`
            from importlib import import_module

            return import_module(f"{__name__}.{name}")
        if name not in __all__ and name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from syncprims import _api

        globals().update((public, getattr(_api, public)) for public in __all__)
        return _api.version() if name == "__version__" else globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
