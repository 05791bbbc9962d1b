"""The private names of torch that this package uses, with the reasons and the versions.

A version of torch that lacks one gets an error from here, and from nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import torch.profiler.profiler

# -- ranks that are threads ------------------------------------------------------------------------


class RankGroups(c10d._World):
    """The groups of one rank.

    torch keeps the groups of a process in a ``_World``, whose attributes are globals of its module
    (2.6 to 2.15). torch's own tests with threads replace the object in the same way.
    """

    pg_map = property(lambda self: self._kept("pg_map"))
    pg_names = property(lambda self: self._kept("pg_names"))
    pg_group_ranks = property(lambda self: self._kept("pg_group_ranks"))
    pg_backend_config = property(lambda self: self._kept("pg_backend_config"))
    tags_to_pg = property(lambda self: self._kept("tags_to_pg"))
    pg_to_tag = property(lambda self: self._kept("pg_to_tag"))
    group_count = 0

    def _kept(self, name: str) -> dict[Any, Any]:
        found: dict[Any, Any] = self.__dict__.setdefault(name, {})
        return found


#: What torch keeps for a process in attributes, and what a new process has there: the module, the
#: name in it, and a function of the rank.
PROCESS_ATTRIBUTES: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    ("torch.distributed.distributed_c10d", "_world", lambda rank: RankGroups()),
    ("torch.distributed.distributed_c10d", "_backend", lambda rank: None),
    ("torch.distributed.distributed_c10d", "_default_pg_init_method", lambda rank: None),
    (
        "torch.nn.parallel.distributed",
        "DistributedDataParallel._active_ddp_module",
        lambda rank: None,
    ),
    ("torch.distributed.tensor._random", "_rng_tracker", lambda rank: None),
)


def forget_groups() -> None:
    """Forget the names of all groups of this thread; torch keeps them in C++."""
    c10d._unregister_all_process_groups()


@contextlib.contextmanager
def threads_as_processes() -> Generator[None]:
    """Within the block, torch keeps for each thread what it keeps in C++ for a process.

    That is the registry in which functional collectives find their group by its name (2.6 to 2.15).
    Profilers record nothing: torch crashes if several threads of a process have a session.
    """
    internal = torch._C._distributed_c10d
    kept = {(cls, name): vars(cls)[name] for cls, name in _WITHOUT_SESSION if name in vars(cls)}
    internal._set_thread_isolation_mode(True)
    for cls, name in kept:
        setattr(cls, name, _WITHOUT_SESSION[cls, name])
    try:
        yield
    finally:
        for (cls, name), method in kept.items():
            setattr(cls, name, method)
        internal._set_thread_isolation_mode(False)


def _return_self(profile: Any) -> Any:
    return profile


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _export_nothing(profile: Any, path: str, *_: Any, **__: Any) -> None:
    Path(path).write_text('{"traceEvents": []}')


#: Methods that begin, end or need the session of a profiler (2.6 to 2.15), and what they do then.
_WITHOUT_SESSION: dict[tuple[type, str], Callable[..., Any]] = {
    (torch.autograd.profiler.profile, "__enter__"): _return_self,
    (torch.autograd.profiler.profile, "__exit__"): _do_nothing,
    (torch.autograd.profiler.profile, "_prepare_trace"): _do_nothing,
    (torch.autograd.profiler.profile, "_start_trace"): _do_nothing,
    (torch.autograd.profiler.profile, "export_chrome_trace"): _export_nothing,
    (torch.profiler.profiler._KinetoProfile, "add_metadata_json"): _do_nothing,
}


# -- programs that ask for another backend ------------------------------------------------------------

_Rendezvous = Callable[[str, int, int], tuple[Any, int, int]]


@contextlib.contextmanager
def serve_any_name(name: str, rendezvous: _Rendezvous | None = None) -> Generator[None]:
    """Within the block, the backend `name` serves every group, under the name that is asked for.

    All groups are made by ``_new_process_group_helper`` (2.6 to 2.15).

    :param rendezvous: returns the store, the rank and the world size, given a URL and what the
        program says of the two, -1 if nothing; in place of torch's own.
    """
    make, meet = c10d._new_process_group_helper, c10d.rendezvous

    def serve(
        group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("device_id", None)
        asked = "gloo" if str(backend) == "undefined" else str(backend)
        group, store = make(group_size, group_rank, ranks, name, *args, **kwargs)
        if group not in (None, c10d.GroupMember.NON_GROUP_MEMBER):
            c10d._world.pg_map[group] = c10d.Backend(asked), store
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(asked)))
        return group, store

    def meet_here(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Any:
        assert rendezvous is not None
        yield rendezvous(url, rank, world_size)

    c10d._new_process_group_helper = serve
    if rendezvous is not None:
        c10d.rendezvous = meet_here
    try:
        yield
    finally:
        c10d._new_process_group_helper, c10d.rendezvous = make, meet
