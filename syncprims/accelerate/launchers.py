"""Start ranks from a notebook, or from a test.

Scripts import these names from a module of this name.
"""

from __future__ import annotations

from typing import Any

from syncprims.testing import run_world


def notebook_launcher(
    function: Any,
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    **others: Any,
) -> None:
    """Run ``function(*args)`` on `num_processes` ranks of this machine; with 1 or None, here.

    Each rank is a process on the file backend, so no port is used. Arguments about ports,
    rendezvous and nodes are accepted if they ask for one node.

    :raises ValueError: if there is a world here already, or more nodes than one are asked for.
    """
    if others.get("num_nodes", 1) != 1:
        raise ValueError("notebook_launcher starts ranks on one machine; use torchrun for several")
    if others.get("max_restarts", 0):
        raise ValueError("notebook_launcher does not restart; use syncprims run --max-restarts")

    def rank() -> None:
        import os

        if mixed_precision not in ("no", "NO"):
            os.environ["ACCELERATE_MIXED_PRECISION"] = str(mixed_precision).lower()
        function(*args)

    if num_processes is None or num_processes <= 1:
        function(*args)
        return
    run_world(rank, num_processes, kind="processes", timeout=None)


def debug_launcher(function: Any, args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run ``function(*args)`` on `num_processes` ranks of this machine, without accelerators."""

    def rank() -> None:
        import os

        os.environ["ACCELERATE_USE_CPU"] = "yes"
        function(*args)

    run_world(rank, num_processes, kind="processes", timeout=None)
