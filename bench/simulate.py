"""Forecast the control plane of many hosts from measurements on one machine.

    python bench/simulate.py [--link MICROSECONDS] [--most HOSTS]

First the simulation has to reproduce the small cases that were measured. Its input is the processor
time of a host, its output the time of a round. Then it computes the sizes that cannot be measured
here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from simulation import BEATS, CONSTANTS, LIMIT, SECOND, Case, Costs, simulate
from table import head, row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scale import Scale

HOSTS = (1, 2, 8, 64, 512, 4096, 10_000)
TOLERANCE = 0.35  #: relative to the measured medians, which differ by as much from run to run
LINK = 50.0  #: microseconds one way between hosts; assumed, not measured
SPREAD = 0.01 * SECOND


class Check(NamedTuple):
    """A measured case and its simulation."""

    hosts: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """The relative error of the simulated time."""
        return self.simulated / self.measured - 1


def checks() -> list[Check]:
    """Simulate the measured cases: hosts and the store share the processors of one machine."""
    constants = json.loads(CONSTANTS.read_text())
    costs = Costs.load()
    found = []
    for hosts, measured in constants["rounds"].items():
        case = Case(int(hosts), ranks=1, rounds=200, processors=constants["processors"])
        calls = simulate(case, costs).calls
        found.append(Check(int(hosts), measured["median"], statistics.median(calls)))
    return found


def demand(hosts: int, costs: Costs) -> tuple[float, float]:
    """Return the store's microseconds for a round without looks, and for a second of heartbeats.

    This computes what the simulation also finds: four messages per host, and six of one host.
    """
    case, server = Case(hosts), costs.server
    piece, decision = case.piece + costs.note, case.decision(costs.note)
    each = server["contribute"] + server["wait"] + server["wake"] + server["read"]
    once = server["wait"] + server["read"] + server["compare_set"] + 3 * server["delete"]
    size = hosts * (2 * piece + decision) + 2 * decision
    beats = hosts * server["add"] * SECOND / (0.875 * LIMIT / BEATS)
    return hosts * each + once + costs.server_per_kb * size / 1024, beats


def saturates_at(costs: Costs, rounds_a_second: float) -> int:
    """Return the most hosts for which one store is not busy all the time, without looks."""
    low, high = 1, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        round_, beats = demand(middle, costs)
        low, high = (middle, high) if rounds_a_second * round_ + beats < SECOND else (low, middle)
    return low


def _rounds(hosts: int) -> int:
    return max(3, min(40, 12_000 // hosts))


def forecast(costs: Costs, sizes: Sequence[int], title: str, change: Case) -> list[str]:
    """Return a table of cases with these changes, for all sizes."""
    cells = ("hosts", "ranks", "median, ms", "p99, ms", "store busy", "messages a round",
             "MB a round", "looks a round")  # fmt: skip
    lines = ["", f"### {title}", *head(*cells)]
    for hosts in sizes:
        rounds = _rounds(hosts)
        case = replace(change, hosts=hosts, rounds=rounds)
        result = simulate(case, costs)
        lines.append(
            row(
                hosts,
                hosts * case.ranks,
                f"{result.quantile(0.5) / 1e3:.2f}",
                f"{result.quantile(0.99) / 1e3:.2f}",
                f"{100 * result.load:.1f} %",
                f"{result.messages / rounds:.0f}",
                f"{result.sent / rounds / 2**20:.2f}",
                f"{result.looks / rounds:.0f}",
            )
        )
        print(title, hosts, file=sys.stderr, flush=True)
    return lines


def section(link: float, most: int) -> tuple[list[str], bool]:
    """Return the forecast as Markdown, and whether the simulation reproduces the measurements."""
    found = checks()
    lines = [
        "## Simulation against measurement",
        "",
        "Barriers in a tight loop. The hosts have one rank each and share the processors.",
        f"An error of at most {100 * TOLERANCE:.0f} % counts as reproduced.",
        *head("hosts", "measured median, us", "simulated, us", "off by"),
    ]
    lines += [
        row(c.hosts, f"{c.measured:.0f}", f"{c.simulated:.0f}", f"{100 * c.error:+.0f} %")
        for c in found
    ]
    costs = Costs.load(link=link)
    sizes = [hosts for hosts in HOSTS if hosts <= most]
    steps = Case(1, period=SECOND, spread=SPREAD)
    lines += [
        "",
        "## Forecast",
        "",
        f"Hosts of 8 ranks, each with its own processors, {link:.0f} us one way (assumed).",
        "Times are from the arrival of the last host until a host continues. *Store busy* is the",
        "load of its thread, including heartbeats; from 100 % on, rounds lag behind their period.",
    ]
    tables = [
        ("One barrier a second, hosts within 10 ms", steps),
        ("One barrier a second, one host 0.3 s late", replace(steps, late=0.3 * SECOND)),
        ("One small broadcast a second, hosts within 10 ms", replace(steps, distinct=2)),
    ]
    for title, case in tables:
        lines += forecast(costs, sizes, title, case)
    lines += ["", "### Where one store saturates, without looks"]
    lines += head("rounds a second", "hosts", "ranks")
    for rate in (1, 10, 100):
        hosts = saturates_at(costs, rate)
        lines.append(row(rate, hosts, 8 * hosts))
    return lines, all(abs(check.error) <= TOLERANCE for check in found)


def measure(scale: Scale) -> dict[str, Any]:
    """Measure the constants if the scale says so, and return the forecast as Markdown."""
    if scale.constants:
        script = CONSTANTS.with_suffix(".py")
        command = [sys.executable, str(script), "--write", "--runs", str(scale.constants)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found, holds = section(LINK, scale.forecast)
    failed = [] if holds else ["the simulation does not reproduce what was measured"]
    return {"lines": found, "failed": failed}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the stored forecast: computing it takes a minute."""
    return ["", *data["lines"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast the control plane of many hosts.")
    parser.add_argument("--link", type=float, default=LINK, help="microseconds, one way")
    parser.add_argument("--most", type=int, default=HOSTS[-1], help="hosts")
    options = parser.parse_args()
    found, holds = section(options.link, options.most)
    print("\n".join(found))
    sys.exit(0 if holds else "the simulation does not reproduce what was measured")


if __name__ == "__main__":
    main()
