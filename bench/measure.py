"""Measure syncprims and its peers: one command makes every figure and every picture.

    python bench/measure.py                        # everything; half an hour on two cores
    python bench/measure.py --only control,data    # these sections; keep the others
    python bench/measure.py --resume               # sections that this commit has not measured
    python bench/measure.py --quick                # test everything, into build/bench: 3 minutes
    python bench/measure.py --quick --only data --ranks 2,4 --sizes 4,65536   # print a few figures
    python bench/measure.py --render               # pages and pictures from stored figures

In each repetition, our library and the peers run in turn, so that a slow minute affects all. After
every section, the figures are stored in results.json with their commit and machine. RESULTS.md,
TORCH.md and the pictures are made from that file alone. Each section runs in a process of its own,
so that memory, threads and worlds of one section do not affect the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
import report
from report import SECTIONS
from scale import FULL, QUICK, Scale
from store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).resolve().parent
QUICK_FOLDER = HERE.parent / "build" / "bench"


def measured(name: str, scale: Scale) -> Mapping[str, Any]:
    """Return the figures of a section, measured in a separate process."""
    command = [sys.executable, str(Path(__file__)), "--child", name, json.dumps(asdict(scale))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": [f"{name}: its measurement ended with exit code {done.returncode}"]}
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(name: str, scale: str) -> None:
    """Measure one section and print its figures as one line of JSON."""
    section = SECTIONS[name]
    found = getattr(import_module(section.module), section.measure)(Scale(**json.loads(scale)))
    print(json.dumps(found))


def run(names: Sequence[str], folder: Path, scale: Scale, *, resume: bool) -> list[str]:
    """Measure sections, store them in `folder`, and return the failures."""
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "results.json")
    state, failed = machine.state(), []
    for name in names:
        if resume and store.has(name, state):
            print(f"== {name}: measured already", file=sys.stderr)
            continue
        print(f"== {name}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        data = measured(name, scale)
        failed += data.get("failed", [])
        if set(data) == {"failed"}:
            continue  # older figures are better than none
        store.put(name, data, state, time.monotonic() - begin)
    return failed


def parsed() -> argparse.Namespace:
    """Return the parsed options."""
    parser = argparse.ArgumentParser(description="Measure syncprims beside its peers.")
    parser.add_argument("--only", help=f"some of: {','.join(SECTIONS)}")
    parser.add_argument(
        "--resume", action="store_true", help="skip the sections that this commit has measured"
    )
    parser.add_argument(
        "--quick", action="store_true", help="test everything quickly; the figures are not precise"
    )
    for name, what in (("ranks", "of the sections control and data"), ("sizes", "in bytes")):
        parser.add_argument(f"--{name}", type=_numbers, help=f"with --quick: {what}")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--into", type=Path, help="folder of results.json and the pages")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.names = options.only.split(",") if options.only else list(SECTIONS)
    unknown = sorted(set(options.names) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    options.into = (options.into or (QUICK_FOLDER if options.quick else HERE)).resolve()
    if (options.ranks or options.sizes) and not options.quick:
        parser.error("--ranks and --sizes need --quick: published figures have all of them")
    if options.quick and options.into == HERE:
        parser.error("--quick gives no figures worth publishing: --into another folder")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main() -> None:
    options = parsed()
    # A start must not compile the library, as it never does once it is installed.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if options.child:
        child(*options.child)
        return
    failed: list[str] = []
    if not options.render:
        scale = QUICK.of(options.ranks, options.sizes) if options.quick else FULL
        failed = run(options.names, options.into, scale, resume=options.resume)
    # Quick figures are not published, so their pictures stay in the same folder.
    pictures = HERE.parent / "docs" / "assets" if options.into == HERE else options.into
    sections = Store(options.into / "results.json").sections
    if options.quick and options.only:
        for name in options.names:
            print("\n".join(report.lines(name, sections[name]["data"])))
    for path in report.write(sections, options.into, pictures):
        print(path, file=sys.stderr)
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
