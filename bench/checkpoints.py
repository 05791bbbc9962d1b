"""Saving and loading 1 GiB beside the peers: time, and memory besides the model.

    python bench/checkpoints.py            # prints a table
    python bench/checkpoints.py --write    # and writes bench/CHECKPOINTS.md

Every measurement is a process of its own, with its measure in it: a save between two plain writes,
loads in turn with those of safetensors. So what else the machine does falls on both. What is told
is the median of the ratios, and how far they lie apart; the order moves on from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, WIDTH = 16, 4096  # 16 x 4096 x 4096 floats: 1 GiB
GIB = LAYERS * WIDTH * WIDTH * 4


# -- what is measured, in a child ---------------------------------------------------------------


TURNS = 5  # loads of each kind in one process


def layers(count: int) -> Any:
    """Return a model with memory that has been touched, and no time spent on random numbers."""
    import torch

    with torch.device("meta"):
        made = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)
        ).to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.fill_(number + 1)
    return made


def model() -> Any:
    return layers(LAYERS).requires_grad_(requires_grad=False)


def training() -> dict[str, Any]:
    """Return a third of that and the state of AdamW for it: 1 GiB again."""
    import torch

    made = layers(5)
    optimizer = torch.optim.AdamW(made.parameters())
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in made.parameters():
        parameter.grad = None
    return {"model": made, "optimizer": optimizer}


def sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def synced(save: Callable[[], object], folder: Path) -> Callable[[], object]:
    """Return a save that also lets the disk have it, as ours does."""

    def both() -> None:
        save()
        sync(folder)

    return both


def plain_write(folder: Path, tensors: list[Any]) -> None:
    """Write the same bytes, as plainly as one can, and sync."""
    fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    for tensor in tensors:
        left = tensor.reshape(-1).numpy().data.cast("B")
        while left:
            left = left[os.write(fd, left[: 4 << 20]) :]
    os.fsync(fd)
    os.close(fd)


def savers(folder: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what makes ready, and returns what is timed."""

    def ours() -> Callable[[], object]:
        from syncprims.training import save_model

        made = model()
        return lambda: save_model(made, folder)

    def ours_state() -> Callable[[], object]:
        from syncprims.training import save_state

        parts = training()
        return lambda: save_state(folder / "state", parts)

    def ours_behind() -> Callable[[], object]:
        from syncprims.training import save_state

        parts = training()
        return lambda: save_state(folder / "state", parts, block=False)

    def copy() -> Callable[[], object]:
        parts = training()
        state = parts["optimizer"].state_dict()["state"].values()
        tensors = [t for one in state for t in one.values()] + list(parts["model"].parameters())
        return lambda: [tensor.detach().clone() for tensor in tensors]

    def safetensors() -> Callable[[], object]:
        from safetensors.torch import save_model

        made = model()
        return synced(lambda: save_model(made, str(folder / "model.safetensors")), folder)

    def torch_save() -> Callable[[], object]:
        import torch

        made = model()
        return synced(lambda: torch.save(made.state_dict(), folder / "model.bin"), folder)

    def accelerate() -> Callable[[], object]:
        from accelerate import Accelerator

        made, accelerator = model(), Accelerator(cpu=True)
        return synced(lambda: accelerator.save_model(made, str(folder)), folder)

    def dcp() -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import save

        made = model()
        return lambda: save(made.state_dict(), checkpoint_id=str(folder / "dcp"), no_dist=True)

    return {
        "save_model": ours, "safetensors": safetensors, "torch.save": torch_save,
        "Accelerate": accelerate, "torch DCP": dcp, "save_state": ours_state,
        "save_state, block=False": ours_behind, "copy in memory": copy,
    }  # fmt: skip


def loaders(folder: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return the same for loading; the file is in the page cache."""
    from syncprims.training import save_model

    made = model()
    save_model(made, folder)

    def ours() -> Callable[[], object]:
        from syncprims.training import load_checkpoint_in_model

        return lambda: load_checkpoint_in_model(made, folder)

    def safetensors() -> Callable[[], object]:
        from safetensors.torch import load_model

        return lambda: load_model(made, folder / "model.safetensors")

    def accelerate() -> Callable[[], object]:
        from accelerate import load_checkpoint_in_model

        return lambda: load_checkpoint_in_model(made, folder)

    return {"load_checkpoint_in_model": ours, "safetensors": safetensors, "Accelerate": accelerate}


def memory() -> tuple[int, int]:
    """Return the memory now, and its peak since it was last reset, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024


def timed(work: Callable[[], object]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def measure_save(name: str, folder: Path) -> dict[str, float]:
    """Return how long a save takes, and how long a plain write just before and after it."""
    plain: list[float] = []
    tensors = [parameter.detach() for parameter in model().parameters()]

    def write() -> None:
        plain.append(timed(lambda: plain_write(folder, tensors))[0])
        clear(folder)

    work = savers(folder)[name]()
    write()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory()[0]
    seconds, result = timed(work)
    peak = memory()[1] - before
    if hasattr(result, "wait"):
        result.wait()
    clear(folder)
    write()
    base = statistics.mean(plain)
    return {"seconds": seconds, "base": base, "ratio": seconds / base, "peak": peak}


def measure_load(name: str, folder: Path) -> dict[str, float]:
    """Return how long a load takes, and how long one by safetensors, in turn."""
    table = loaders(folder)
    work, other = table[name](), table["safetensors"]()
    own: list[float] = []
    base: list[float] = []
    for _ in range(TURNS + 1):
        own.append(timed(work)[0])
        base.append(timed(other)[0])
    # Without the first: then all memory of the model has been touched, and the file is at hand.
    seconds, measure = statistics.median(own[1:]), statistics.median(base[1:])
    Path("/proc/self/clear_refs").write_text("5")
    before = memory()[0]
    work()
    peak = memory()[1] - before
    return {"seconds": seconds, "base": measure, "ratio": seconds / measure, "peak": peak}


# -- the table ----------------------------------------------------------------------------------


def measure(kind: str, names: list[str], rounds: int, place: str | None) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                # Nothing that is still to be written from before falls into this measurement.
                os.sync()
                command = [sys.executable, __file__, "--child", kind, name, folder]
                clean = {k: v for k, v in os.environ.items() if "SYNCPRIMS" not in k}
                done = subprocess.run(
                    command, capture_output=True, text=True, env=clean, check=False
                )
                if done.returncode:
                    print(f"{kind} {name}: {done.stderr.strip()[-300:]}", file=sys.stderr)
                    continue
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {name: some for name, some in found.items() if some}


def rows(found: dict[str, list[dict[str, float]]], digits: int) -> list[str]:
    """Return a line for each: medians, and the lowest and highest ratio."""
    lines: list[str] = []
    for name, some in found.items():
        seconds, ratio, peak = (
            statistics.median(one[key] for one in some) for key in ("seconds", "ratio", "peak")
        )
        low, high = min(one["ratio"] for one in some), max(one["ratio"] for one in some)
        spread = f"{ratio:.2f} ({low:.2f}, {high:.2f})"
        lines.append(f"| {name} | {seconds:.{digits}f} | {spread} | {peak / 1e6:.0f} |")
    return lines


def table(saved: dict[str, Any], loaded: dict[str, Any], rounds: int) -> str:
    plain = statistics.median(one["base"] for some in saved.values() for one in some)
    lines = [
        f"1 GiB of float32, median of {rounds} processes each, {os.cpu_count()} cores. A plain",
        f"write and sync of as many bytes took {plain:.2f} s: one before and one after each save,",
        "in its process, are its measure. What does not sync by itself was synced within its time.",
        "A state is 1/3 model, 2/3 AdamW. Memory is what came on top of the model.",
        "",
        "| saving | seconds | of a plain write (lowest, highest) | extra memory, MB |",
        "|---|---|---|---|",
        *rows(saved, 2),
        "",
        f"Loads are from the page cache, in turn with those of safetensors, {TURNS} times.",
        "",
        "| loading into a model | seconds | of safetensors (lowest, highest) | extra memory, MB |",
        "|---|---|---|---|",
        *rows(loaded, 3),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "NAME", "FOLDER"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--place", help="a directory on the disk to measure")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.child:
        kind, name, folder = options.child
        measured = measure_save if kind == "save" else measure_load
        print(json.dumps(measured(name, Path(folder))))
        return
    saved = measure("save", list(savers(Path())), options.rounds, options.place)
    names = ["load_checkpoint_in_model", "safetensors", "Accelerate"]
    text = table(saved, measure("load", names, options.rounds, options.place), options.rounds)
    print(text)
    if options.write:
        head = "# Checkpoints: time and memory\n\n"
        head += "Written by `python bench/checkpoints.py --write`.\n\n"
        Path(__file__).with_name("CHECKPOINTS.md").write_text(head + text)


if __name__ == "__main__":
    main()
