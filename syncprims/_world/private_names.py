"""Private names of Python that the core reads."""

from __future__ import annotations

from syncprims._system.upstream import OptionalName as Optional
from syncprims._system.upstream import PrivateNames

_SHUTDOWN = Optional("reports a failing end before threads are joined", "it is reported after that")
_CHILDREN = Optional("names the process that a rank waits for at its end", "it is not named")
_RAISED = Optional("reports what a child of multiprocessing has raised", "an exit is reported")

NAMES = PrivateNames(
    "_world",
    {
        "threading": {"_shutdown": _SHUTDOWN},
        "multiprocessing.process": {"_children": _CHILDREN, "BaseProcess._bootstrap": _RAISED},
    },
)
