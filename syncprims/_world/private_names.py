"""Private names of Python that the core reads."""

from __future__ import annotations

from syncprims._system.upstream import OptionalName, PrivateNames

NAMES = PrivateNames(
    "_world",
    {
        "threading": {
            "_shutdown": OptionalName(
                "reports a failing end before threads are joined", "it is reported after that"
            )
        },
        "multiprocessing.process": {
            "_children": OptionalName(
                "names the process that a rank waits for at its end", "it is not named"
            ),
            "BaseProcess._bootstrap": OptionalName(
                "reports what a child of multiprocessing has raised", "it is reported as an exit"
            ),
        },
    },
)
