"""Show which world a program would start if it ran here, and why.

Name the variables, set or not, that decide it. If they contradict each other, show the error.

exit code: 0 if a world would start, 2 if starting it would be an error.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from syncprims._system.host import count_processors
from syncprims._system.upstream import installed_tables
from syncprims._world.launchers import LAUNCHERS, explain, find_half_world
from syncprims._world.registry import choose_backend
from syncprims._world.settings import derive_store, find_misspelt, read_settings
from syncprims._world.world import version
from syncprims.errors import SyncError
from syncprims.interface import UNKNOWN, Topology

from .console import CommandParser, Style, table

#: Variables of ours and of others that we read, and what applies where they are not set.
SETTINGS = (
    ("SYNCPRIMS_TIMEOUT", "no limit where the backend sees death, else 1800 s"),
    ("SYNCPRIMS_JOIN_TIMEOUT", "300 s"),
    ("SYNCPRIMS_WARN_AFTER", "30 s"),
    ("SYNCPRIMS_DUMP_AFTER", "no limit"),
    ("SYNCPRIMS_DIR", "$XDG_RUNTIME_DIR, else shared memory"),
    ("SYNCPRIMS_RUN_ID", "the launcher's"),
    ("SYNCPRIMS_HEARTBEAT", "10 s"),
    ("SYNCPRIMS_PICKLE", "1, pickle is allowed"),
    ("SYNCPRIMS_STRICT", "0, lines of calls are not compared"),
    ("SYNCPRIMS_MIXED_PRECISION", "no"),
    ("SYNCPRIMS_CHECK_REPLICAS", "0, replicas are not compared"),
    ("SYNCPRIMS_SERVE_TORCH", "0, torch.distributed has the backend it asks for"),
    ("SYNCPRIMS_TRACE", "no trace"),
    ("SYNCPRIMS_TRACE_LIMIT", "256, MiB for each rank"),
    ("MASTER_ADDR", "of SLURM: the first node"),
    ("MASTER_PORT", "of SLURM: from the job's number"),
    ("OMP_NUM_THREADS", "one thread per processor, in every rank"),
    ("CUDA_VISIBLE_DEVICES", "all devices"),
    ("XDG_RUNTIME_DIR", "shared memory"),
)
_DECIDING = (("SYNCPRIMS_BACKEND", "auto"), ("SYNCPRIMS_LAUNCHER", "found by its variables"))


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="the same for programs, as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the world that would start."""
    environ: Mapping[str, str] = options.environ
    world = preview(environ)
    text = "\n".join(report(world, environ, Style(sys.stdout, environ)))
    print(json.dumps(world, indent=2) if options.json else text)  # noqa: T201
    return 0 if world["error"] is None else 2


def preview(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the world that `environ` describes, without joining it or waiting for anything.

    As JSON for programs: a variable that is not set is null.
    """
    names = [name for name, _ in (*_DECIDING, *SETTINGS)]
    names += [name for launcher in LAUNCHERS for name in launcher.variables]
    world: dict[str, Any] = {
        "backend": environ.get("SYNCPRIMS_BACKEND") or None,
        "chosen_by": "",
        "topology": None,
        "launchers": {},
        "half_world": None,
        "settings": None,
        "error": None,
        "variables": {name: environ.get(name) for name in dict.fromkeys(names)},
        "misspelt": find_misspelt(environ),
        "missing_names": [line for table in installed_tables() for line in table.report()],
        "here": {
            "host": socket.gethostname(),
            "processors": str(count_processors()),
            "python": f"{platform.python_version()}, {sys.executable}",
            "syncprims": version(),
            "torch": "installed" if find_spec("torch") else "not installed",
        },
    }
    settings = None
    try:
        settings = read_settings(environ)
        topology, world["launchers"] = explain(environ)
        world["topology"] = topology._asdict()
        choice = choose_backend(environ, None, grouped=False, find_topology=lambda: topology)
        world["backend"], world["chosen_by"] = choice.backend, choice.chosen_by
        if topology.world_size == 1:
            world["half_world"] = find_half_world(environ, topology) or None
        if settings.store is None:
            settings = settings._replace(store=derive_store(environ, topology))
        choice.load().check(choice.topology, settings)
    except SyncError as error:
        world["error"] = {"type": type(error).__name__, "message": str(error)}
    if settings is not None:  # JSON has no infinite numbers
        values = settings._asdict().items()
        world["settings"] = {key: "inf" if value == math.inf else value for key, value in values}
    return world


# -- text for people ----------------------------------------------------------------------


def report(world: Mapping[str, Any], environ: Mapping[str, str], style: Style) -> list[str]:
    """Return the lines of the report."""
    topology = world["topology"]
    if world["error"] is not None:
        lines = [style("red", "No world would start: " + world["error"]["type"])]
        lines += [f"  {line}" for line in world["error"]["message"].splitlines()]
    elif topology["world_size"] == 1:
        lines = [style("bold", f"A world of one would start: backend {world['backend']}.")]
        lines += [style("yellow", f"  But {world['half_world']}.")] if world["half_world"] else []
    else:
        rank = f"Rank {topology['rank']} of {topology['world_size']}"
        how = f"backend {world['backend']}, started by {topology['launcher']}"
        lines = [style("bold", f"{rank} would start: {how}.")]
    rows: list[tuple[str, str, str]] = []
    if world["chosen_by"]:
        rows.append(("backend", world["backend"] or "auto", f"chosen by {world['chosen_by']}"))
    if topology is not None:
        rows += _place(Topology(**topology), environ)
        if topology["world_size"] > 1:
            rows.append(("store", *_store(world["settings"], environ)))

    def variables(*named: tuple[str, str]) -> list[str]:
        values = world["variables"]
        texts = [f"= {values[n]}" if values[n] else f"not set: {default}" for n, default in named]
        return table([(name, text) for (name, _), text in zip(named, texts, strict=True)])

    lines += ["", *table(rows)] if rows else []
    lines += ["", style("bold", "The deciding variables"), *variables(*_DECIDING)]
    lines.append("  launchers; if two differ, the one that started inside the other decides:")
    lines += table(_launchers(world, environ), "    ")
    lines += ["", style("bold", "Settings"), *variables(*SETTINGS)]
    if unknown := world["misspelt"]:
        lines += ["", style("yellow", "Set, but never read")]
        lines += table([(n, f"did you mean {m}?" if m else "") for n, m in unknown.items()])
    if missing := world["missing_names"]:
        lines += [
            "",
            style("yellow", "Private names that are missing"),
            *(f"  {m}" for m in missing),
        ]
    return [*lines, "", style("bold", "Here"), *table([*world["here"].items()])]


def _place(topology: Topology, environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the rows about this process's place in the world."""
    source = "no launcher's variables are set"
    if topology.launcher != "none":
        named = [launcher for launcher in LAUNCHERS if launcher.name == topology.launcher]
        source = named[0].says(environ) if named else f"{topology.launcher} says so"
    numbers = {
        "local rank": (topology.local_rank, topology.local_world_size),
        "node": (topology.node_rank, topology.num_nodes),
    }
    hosts = "the launcher says so; once the ranks have met, it follows from who shares a host"
    if topology.launcher == "none":
        hosts = "a world of one"
    elif any(UNKNOWN in pair for pair in numbers.values()):
        hosts = "known once the ranks have met: the launcher does not say all"
    use = "the same on all ranks of one run"
    if topology.run_id is None:
        use = "no other rank to meet" if topology.world_size == 1 else "set SYNCPRIMS_RUN_ID"
    rows = [("rank", f"{topology.rank} of {topology.world_size}", source)]
    for name, pair in numbers.items():
        known = ["not known" if number == UNKNOWN else str(number) for number in pair]
        rows.append((name, " of ".join(dict.fromkeys(known) if UNKNOWN in pair else known), hosts))
    return [*rows, ("run id", topology.run_id or "none", use)]


def _store(settings: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str]:
    if settings["store"] is None:
        return "none", "ranks of one host need none"
    names = [name for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    derived = "SLURM's first node and the run id" if len(names) < 2 else ""
    served = "torchrun's agent serves it" if settings["agent_store"] else "rank 0 serves it"
    return ":".join(map(str, settings["store"])), f"{' and '.join([*names, derived][:2])}; {served}"


def _launchers(world: Mapping[str, Any], environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for launcher in LAUNCHERS:
        state = "is no step"  # SLURM's variables are in every shell of a job
        if launcher.name in world["launchers"]:
            state = world["launchers"][launcher.name]
        elif not launcher.is_present(environ):
            state = "is unused"
        elif world["topology"] is None:
            state = "is set"
        elif environ.get("SYNCPRIMS_LAUNCHER"):
            state = "does not count"
        shown = [f"{name}={environ[name]}" for name in launcher.variables if name in environ]
        if absent := [name for name in launcher.variables[:2] if name not in environ]:
            shown.append(f"{', '.join(absent)} not set")
        rows.append((launcher.name, state, "; ".join(shown)))
    return rows
