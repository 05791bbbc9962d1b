"""``syncprims doctor``: measure a running job, and say what is wrong with it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from .options import seconds
from .parser import checked
from .terminal import Style, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from .parser import CommandParser

EXAMPLES = """\
examples:
  syncprims run -n 4 -m syncprims doctor
  torchrun --nproc-per-node 4 -m syncprims doctor
  srun -n 8 python -m syncprims doctor
  syncprims doctor                                  one rank, alone

Start it the way the job is started: by the same launcher, with the same variables. Every rank takes
part and rank 0 prints, once. exit code: 0 if it could be measured, whatever it found; 2 if not."""


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Describe the command."""
    parser = commands.add_parser(
        "doctor",
        help="measure a job from inside, and say what to do better",
        description="Measure round trips and bandwidth in the real job, see which ranks share a "
        "host and its memory, how far clocks are apart, and which versions differ; then say in "
        "plain words what is wrong, and the cure.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="the same for programs, as JSON")
    parser.add_argument(
        "--seconds", type=checked(seconds), default=0.2, metavar="S",
        help="how long each measure takes, about (default: 0.2)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine the job; every rank does, and rank 0 prints."""
    from syncprims import init

    with init() as world:
        found = examine(world, options.environ, options.seconds)
        if world.rank == 0:
            _show(found, options)
    return 0


def examine(world: Any, environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return what all ranks find out together, the same on each."""
    from syncprims.doctor import facts, measures

    return {
        "backend": world.backend_name,
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "ranks": world.group.all_gather(facts.own_facts(world, environ)),
        "latency": measures.latency(world, seconds),
        "bandwidth": measures.bandwidth(world, seconds) if world.world_size > 1 else [],
        "clocks": measures.clocks(world),
    }


def _show(found: dict[str, Any], options: argparse.Namespace) -> None:
    from syncprims.doctor.report import report
    from syncprims.doctor.verdicts import verdicts

    said = verdicts(found)
    if options.json:
        print(json.dumps({**found, "verdicts": [v._asdict() for v in said]}, indent=2))  # noqa: T201
        return
    style = Style(sys.stdout, options.environ)
    print("\n".join(report(found, said, style, table)))  # noqa: T201
