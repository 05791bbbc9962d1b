"""Measure the torch backend beside its peers, and forecast it on many hosts.

    python bench/measure_torch.py [--write] [--quick]

Ours and the peers run in turn within each repetition, as in `measure.py`. `--write` puts the
figures into TORCH.md; the forecast there uses what `constants.py --write` has measured before.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jobs
import machine
import simulate
from catalogue import CONTROL, OURS, Aim
from table import Seen, head, row

RESULTS = Path(__file__).with_name("TORCH.md")

ONE_HOST = {OURS: "syncprims, torchrun", "Gloo": "Gloo", "Accelerate": "Accelerate"}
TWO_HOSTS = {OURS: "syncprims, two hosts", "Gloo": "Gloo, two hosts"}
AIMS = (
    Aim("barrier", "Gloo", at_least=20),
    Aim("barrier", "Accelerate", at_least=20),
    Aim("flag", "Gloo", at_least=20),
    Aim("flag", "Accelerate", at_least=20),
    Aim("small dict", "Gloo", at_least=20),
    Aim("all_gather", "Gloo"),
)


def beside(
    title: str, libraries: dict[str, str], ranks: tuple[int, ...], runs: int, seconds: float
) -> tuple[list[str], list[str]]:
    """Return the table of one setting, and what failed."""
    seen = Seen()
    plan: dict[str, object] = {"what": "control", "seconds": seconds}
    for _ in range(runs):
        for count in ranks:
            for name, kind in libraries.items():
                print(f"{title}, {count} ranks: {name}", file=sys.stderr, flush=True)
                try:
                    seen.add(count, name, jobs.start(kind, count, plan))
                except jobs.NoFigures as error:
                    seen.lack(count, name, CONTROL, str(error))
    lines = ["", f"## {title}"]
    lines += head("ours", "beside", "aim", *(f"{count} ranks" for count in ranks))
    for aim in AIMS:
        if aim.peer not in libraries:
            continue
        shown = aim if libraries is ONE_HOST else aim._replace(at_least=None)
        cells = [seen.verdict(count, shown, aim.operation) for count in ranks]
        peer = CONTROL[aim.operation][aim.peer]
        lines.append(row(CONTROL[aim.operation][OURS], f"{aim.peer}: {peer}", shown, *cells))
    for count in ranks:
        lines += ["", f"### {count} ranks, microseconds per call"]
        lines += head("by", "call", "median", "range", "times ours")
        for operation in ("barrier", "flag", "small dict", "all_gather"):
            calls = {name: c for name, c in CONTROL[operation].items() if name in libraries}
            lines += seen.rows(count, operation, calls)
    return lines, seen.failed


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the torch backend beside its peers.")
    parser.add_argument("--write", action="store_true", help="also write TORCH.md")
    parser.add_argument("--quick", action="store_true", help="try everything once")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick gives no figures worth writing")
    runs, seconds = (1, 0.02) if options.quick else (options.runs, 0.2)
    one, failed = beside("One host, under torchrun", ONE_HOST, (2, 4, 8), runs, seconds)
    title = "Two pretended hosts, over the loopback"
    two, failed_too = beside(title, TWO_HOSTS, (2, 4), runs, seconds)
    # In a quick run small sizes only: the largest take a minute.
    forecast, holds = simulate.section(simulate.LINK, 64 if options.quick else 10_000)
    lines = ["# Results of the torch backend", "", *machine.described()[:3]]
    lines += ["", f"Medians of {runs} runs. Ratios are the peer's time over ours: more is better."]
    lines += [*one, *two, "", *forecast]
    failed += failed_too
    if failed:
        lines += ["", "What failed:", "", *(f"- {failure}" for failure in failed)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        RESULTS.write_text(text.replace("`make bench`", "`bench/measure_torch.py`"))
    sys.exit(1 if failed or not holds else 0)


if __name__ == "__main__":
    main()
