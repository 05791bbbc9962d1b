"""Make RESULTS.md, TORCH.md and the pictures from the stored figures alone."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import plots
import summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    Sections = Mapping[str, Mapping[str, Any]]


class Section(NamedTuple):
    """Figures that are measured together, and the module functions that measure them."""

    module: str
    measure: str = "measure"
    lines: str = "lines"
    page: str = "RESULTS.md"


SECTIONS = {
    "alone": Section("essentials"),
    "control": Section("control", "control_plane", "local_lines"),
    "waiting": Section("waiting"),
    "watched": Section("watched"),
    "data": Section("bulk"),
    "resources": Section("resources"),
    "startup": Section("startup"),
    "kills": Section("death", "section"),
    "survivors": Section("survivors"),
    "worlds": Section("worlds"),
    "c10d": Section("c10d"),
    "training": Section("overhead"),
    "checkpoints": Section("checkpoints"),
    "suites": Section("suites"),
    "torchrun": Section("control", "under_torchrun", "torchrun_lines", "TORCH.md"),
    "hosts": Section("control", "two_hosts", "hosts_lines", "TORCH.md"),
}

_HOW = [
    "Rely on the ratios: peers and our library ran in turn, in the same minutes. MPICH runs with",
    "its defaults, by `mpiexec -n RANKS` through mpi4py, not bound to processors; Open MPI by",
    "`mpirun --oversubscribe --bind-to none`. Their ranks spin while they wait. Gloo and",
    "Accelerate run under torchrun. Each rank has one math thread.",
]


def write(sections: Sections, folder: Path, pictures: Path) -> list[Path]:
    """Write the pages and pictures, and return their paths."""
    pictures.mkdir(parents=True, exist_ok=True)
    texts = {
        folder / "RESULTS.md": results(sections, os.path.relpath(pictures, folder)),
        folder / "TORCH.md": torch(sections),
        pictures / "latency.svg": plots.latency(sections),
        pictures / "arrays.svg": plots.arrays(sections),
    }
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)


def results(sections: Sections, pictures: str) -> str:
    """Return the page with the first table and all figures of one host without torch."""
    found = [
        "# Results",
        "",
        "`make bench` (`bench/measure.py`) makes this page from `results.json`. To measure one",
    ]
    found += ["section again, run `python bench/measure.py --only SECTION`.", ""]
    found += [*_HOW, *summary.lines(sections), "", *_picture("latency", pictures), ""]
    found += [*_picture("arrays", pictures), *_state(sections, SECTIONS), *_failed(sections)]
    found += ["", "The torch backend: [TORCH.md](TORCH.md)."]
    return _joined(found, sections, "RESULTS.md")


def torch(sections: Sections) -> str:
    """Return the page of the torch backend."""
    own = [name for name, section in SECTIONS.items() if section.page == "TORCH.md"]
    found = [
        "# Results of the torch backend",
        "",
        "`make bench` (`bench/measure.py`) makes this page from",
    ]
    found += ["`results.json`. [RESULTS.md](RESULTS.md) has the promises and the other figures."]
    return _joined([*found, *_state(sections, own)], sections, "TORCH.md")


def lines(name: str, data: Mapping[str, Any]) -> list[str]:
    """Return the figures of one section."""
    section = SECTIONS[name]
    found: list[str] = getattr(import_module(section.module), section.lines)(data)
    return found


def _joined(first: list[str], sections: Sections, page: str) -> str:
    for name, section in SECTIONS.items():
        if section.page == page and name in sections:
            first += lines(name, sections[name]["data"])
    return "\n".join(first) + "\n"


def _picture(name: str, folder: str) -> list[str]:
    return [f"![{plots.TITLES[name]}]({folder}/{name}.svg)"]


def _state(sections: Sections, names: Iterable[str]) -> list[str]:
    """Return the origin of the figures, one line per commit and machine."""
    lines = ["", "## State", ""]
    origins: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        if name in sections:
            origin = tuple(sections[name][what] for what in ("commit", "machine", "versions"))
            origins.setdefault(origin, []).append(name)
    for (commit, place, versions), measured in origins.items():
        minutes = sum(sections[name]["seconds"] for name in measured) / 60
        joined = ", ".join(f"`{name}`" for name in measured)
        took = f"; {minutes:.0f} minutes" if minutes else ""
        lines.append(f"- syncprims at {commit}, on {place}, with {versions}: {joined}{took}.")
    absent = ", ".join(f"`{name}`" for name in names if name not in sections)
    if absent:
        lines.append(f"- Not measured yet: {absent}.")
    return lines


def _failed(sections: Sections) -> list[str]:
    failures = [f"- {one}" for kept in sections.values() for one in kept["data"].get("failed", [])]
    return ["", "What failed:", "", *failures] if failures else []
