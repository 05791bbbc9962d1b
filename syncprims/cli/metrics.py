"""Print figures of the worlds of this host in the text format of Prometheus.

They are read from outside, as by `syncprims who`: nothing has to be switched on in the job.

examples:
  syncprims metrics                   of all worlds of this user on this host; of all users for root
  syncprims metrics my-run            of this run id, this directory, or this process
  syncprims metrics > DIR/syncprims.prom   for the textfile collector of the node exporter

exit code: 0, also if no world runs here; 2 if there is no such world, or it cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from syncprims.who import WorldReport, who

from .console import CommandParser
from .who import add_world

_UNSEEN = ("absent", "elsewhere")  # the states of ranks of which this host knows too little


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    add_world(parser)


def run(options: argparse.Namespace) -> int:
    """Print the figures."""
    reports = [one for one in who(options.which) if one.finding.kind != "unreadable"]
    print("\n".join(metrics(reports)))  # noqa: T201
    return 0


def metrics(reports: Sequence[WorldReport]) -> Iterator[str]:
    """Return the lines, those of one metric together."""
    ranks = [
        (f'{{run_id="{_escape(world.run_id)}",rank="{rank.rank}"}}', rank)
        for world in reports
        for rank in world.ranks
        if rank.state not in _UNSEEN
    ]
    worlds = [(f'{{run_id="{_escape(world.run_id)}"}}', world) for world in reports]
    for name, kind, about, samples in (
        ("rounds_total", "counter", "Rounds in which a rank has taken part.",
         [(labels, rank.rounds) for labels, rank in ranks]),
        ("waiting_seconds", "gauge", "For how long a rank has waited in its present call.",
         [(labels, rank.waiting_s or 0) for labels, rank in ranks]),
        ("restarts_total", "counter", "How often the ranks of a run were started again.",
         [(labels, world.restart) for labels, world in worlds]),
        ("seconds_since_last_round", "gauge", "Absent while no rank waits and none makes a call.",
         [(labels, world.idle_s) for labels, world in worlds]),
        ("stuck", "gauge", "1 if a rank has waited for 30 s.",
         [(labels, int(world.finding.stuck)) for labels, world in worlds]),
    ):  # fmt: skip
        known = [
            f"syncprims_{name}{labels} {value}" for labels, value in samples if value is not None
        ]
        if known:
            yield f"# HELP syncprims_{name} {about}"
            yield f"# TYPE syncprims_{name} {kind}"
            yield from known


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
