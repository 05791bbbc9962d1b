"""Measure saving and loading 1 GiB, and the same in the peers: time and extra memory.

    python bench/measure.py --only checkpoints

Every measurement runs in a process of its own, together with its reference: a save runs between two
plain writes, and loads alternate with loads of safetensors. So other programs slow down both. The
results are the median and the range of the ratios. The order changes from round to round.
"""

from __future__ import annotations

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

from table import Seen, head, row, span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scale import Scale

LAYERS = 16  #: of width x width floats: 4096 makes 1 GiB
TURNS = 5  #: loads of each kind in one process
PLAIN = "plain write"
SAVED, LOADED = "of a plain write", "of safetensors"  #: the ratios
LOADERS = ["load_checkpoint_in_model", "safetensors", "Accelerate"]
#: Ending of an operation's name -> what it loads into: a new model or one in use; from a file that
#: was just read, or that is on the disk only.
LOADS = {
    "": "a model in use, from the page cache",
    ", cold": "a model in use, from the disk",
    ", new": "a new model, from the page cache",
    ", new, cold": "a new model, from the disk",
}


# -- measurements, in a child process ------------------------------------------------------------


def empty(count: int, width: int) -> Any:
    """Return a model on the meta device."""
    import torch

    with torch.device("meta"):
        return torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(count))


def layers(count: int, width: int) -> Any:
    """Return a model whose memory was written, without time spent on random numbers."""
    import torch

    made = empty(count, width).to_empty(device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.fill_(number + 1)
    return made


def model(width: int) -> Any:
    return layers(LAYERS, width).requires_grad_(requires_grad=False)


def training(width: int) -> dict[str, Any]:
    """Return a model of a third of the size, and the state of its AdamW: 1 GiB in total."""
    import torch

    made = layers(5, width)
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
    """Return a save that also syncs its files to the disk, as ours does."""

    def both() -> None:
        save()
        sync(folder)

    return both


def plain_write(folder: Path, tensors: list[Any]) -> None:
    """Write the same number of bytes in the simplest way, and sync."""
    fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    for tensor in tensors:
        left = tensor.reshape(-1).numpy().data.cast("B")
        while left:
            left = left[os.write(fd, left[: 4 << 20]) :]
    os.fsync(fd)
    os.close(fd)


def savers(folder: Path, width: int) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return functions that prepare a save; each returns the function to time."""

    def ours() -> Callable[[], object]:
        from syncprims.training import save_model

        made = model(width)
        return lambda: save_model(made, folder)

    def ours_state() -> Callable[[], object]:
        from syncprims.training import save_state

        parts = training(width)
        return lambda: save_state(folder / "state", parts)

    def ours_behind() -> Callable[[], object]:
        from syncprims.training import save_state

        parts = training(width)
        return lambda: save_state(folder / "state", parts, block=False)

    def copy() -> Callable[[], object]:
        parts = training(width)
        state = parts["optimizer"].state_dict()["state"].values()
        tensors = [t for one in state for t in one.values()] + list(parts["model"].parameters())
        return lambda: [tensor.detach().clone() for tensor in tensors]

    def safetensors() -> Callable[[], object]:
        from safetensors.torch import save_model

        made = model(width)
        return synced(lambda: save_model(made, str(folder / "model.safetensors")), folder)

    def torch_save() -> Callable[[], object]:
        import torch

        made = model(width)
        return synced(lambda: torch.save(made.state_dict(), folder / "model.bin"), folder)

    def accelerate() -> Callable[[], object]:
        from accelerate import Accelerator

        made, accelerator = model(width), Accelerator(cpu=True)
        return synced(lambda: accelerator.save_model(made, str(folder)), folder)

    def dcp() -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import save

        made = model(width)
        return lambda: save(made.state_dict(), checkpoint_id=str(folder / "dcp"), no_dist=True)

    return {
        "save_model": ours, "safetensors": safetensors, "torch.save": torch_save,
        "Accelerate": accelerate, "torch DCP": dcp, "save_state": ours_state,
        "save_state, block=False": ours_behind, "copy in memory": copy,
    }  # fmt: skip


def loaders(
    folder: Path, width: int, *, new: bool
) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return the same for loads into a model in use, or into a new one that the load returns."""
    from syncprims.training import save_model

    made = model(width)
    save_model(made, folder)

    def target() -> Any:
        return empty(LAYERS, width) if new else made

    def ours() -> Callable[[], object]:
        from syncprims.training import load_checkpoint_in_model

        def load() -> Any:
            load_checkpoint_in_model(into := target(), folder)
            return into

        return load

    def safetensors() -> Callable[[], object]:
        from safetensors.torch import load_model

        def load() -> Any:
            into = target()
            load_model(into.to_empty(device="cpu") if new else into, folder / "model.safetensors")
            return into

        return load

    def accelerate() -> Callable[[], object]:
        from accelerate import load_checkpoint_in_model

        def load() -> Any:
            load_checkpoint_in_model(into := target(), folder, {"": "cpu"} if new else None)
            return into

        return load

    return {"load_checkpoint_in_model": ours, "safetensors": safetensors, "Accelerate": accelerate}


def memory() -> tuple[int, int]:
    """Return the current memory and its peak since the last reset, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024


def timed(work: Callable[[], object]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def measure_save(name: str, folder: Path, width: int) -> dict[str, float]:
    """Return the time of a save, and of plain writes just before and after it."""
    plain: list[float] = []
    tensors = [parameter.detach() for parameter in model(width).parameters()]

    def write() -> None:
        plain.append(timed(lambda: plain_write(folder, tensors))[0])
        clear(folder)

    work = savers(folder, width)[name]()
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


def leave_page_cache(folder: Path) -> None:
    """Drop the model's file from the page cache."""
    fd = os.open(folder / "model.safetensors", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure_load(name: str, folder: Path, width: int, how: str) -> dict[str, float]:
    """Return the time of a load, and of a load by safetensors, in turn."""
    table = loaders(folder, width, new="new" in how)
    work, other = table[name](), table["safetensors"]()
    own: list[float] = []
    base: list[float] = []
    for _ in range(TURNS + 1):
        for times, load in ((own, work), (base, other)):
            if "cold" in how:
                leave_page_cache(folder)
            times.append(timed(load)[0])
    # Leave out the first: afterwards the memory of the model and the file are in the cache.
    seconds, measure = statistics.median(own[1:]), statistics.median(base[1:])
    Path("/proc/self/clear_refs").write_text("5")
    before = memory()[0]
    work()
    peak = memory()[1] - before
    return {"seconds": seconds, "base": measure, "ratio": seconds / measure, "peak": peak}


# -- the table ----------------------------------------------------------------------------------


def measure(scale: Scale) -> dict[str, Any]:
    """Return the seconds, ratios and memory of saves and loads."""
    rounds, width = scale.checkpoint
    seen = Seen()
    tasks = [("save", list(savers(Path(), 0)), "")]
    tasks += [("load", LOADERS, how) for how in LOADS]
    for kind, names, how in tasks:
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                print(f"checkpoints: {kind}{how}, {name}", file=sys.stderr, flush=True)
                _measure_one(seen, kind, name, width, how)
    return {**seen.stored(), "rounds": rounds, "bytes": 4 * LAYERS * width**2}


def _measure_one(seen: Seen, kind: str, name: str, width: int, how: str) -> None:
    names = (SAVED, "extra memory") if kind == "save" else (LOADED, "memory to load")
    time_of, ratio, memory = (each + how for each in (kind, *names))
    with tempfile.TemporaryDirectory() as folder:
        os.sync()  # earlier writes must not slow down this measurement
        command = [sys.executable, __file__, "--child", kind, name, folder, str(width), how]
        clean = {k: v for k, v in os.environ.items() if "SYNCPRIMS" not in k}
        done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        lacking = "not installed: " if "ModuleNotFoundError" in last else ""
        seen.lack(1, name, (time_of, ratio, memory), f"{lacking}{last}")
        return
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found = {
        time_of: [figures["seconds"]],
        ratio: [figures["ratio"]],
        memory: [figures["peak"] / 1e6],
    }
    # A state is 1/3 model and 2/3 AdamW, so it is not comparable with save_model.
    seen.add(1, name, found)
    if kind == "save":
        seen.add(1, PLAIN, {"save": [figures["base"]]})


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    size = data["bytes"] / 2**30
    plain = seen.median(1, PLAIN, "save") or 0.0
    return [
        "",
        "## Checkpoints",
        "",
        f"{size:.3g} GiB of float32, medians of {data['rounds']} processes each. A plain write and",
        f"sync of this size took {plain:.2f} s. One before and one after each save, in the same",
        "process, are its reference. If a library does not sync, a sync is part of its time. A",
        "state is 1/3 model, 2/3 AdamW. Extra memory is in addition to the model.",
        *_table(seen, "saving", "save", SAVED, "extra memory"),
        "",
        f"Loads run in turn with loads of safetensors, {TURNS} times. A new model is on the meta",
        "device; safetensors gets it with memory that nobody has written. A model in use has",
        "values, which ours keeps if the file is damaged: it reads the file twice.",
        *(
            line
            for how, into in LOADS.items()
            for line in _table(
                seen, f"into {into}", f"load{how}", LOADED + how, f"memory to load{how}"
            )
        ),
    ]


def _table(seen: Seen, what: str, kind: str, ratio: str, memory: str) -> list[str]:
    found = [*head(what, "seconds", ratio.partition(",")[0], "range", "extra memory, MB")]
    for _, name, operation in seen.names():
        if operation != kind or name == PLAIN:
            continue
        seconds, times, extra = (
            seen.median(1, name, kind) or 0.0,
            seen.figures(1, name, ratio),
            seen.median(1, name, memory) or 0.0,
        )
        middle = f"{statistics.median(times):.2f}"
        found.append(row(name, f"{seconds:.3f}", middle, span(times), f"{extra:.0f}"))
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, name, folder, width, how = sys.argv[2:]
        if kind == "save":
            found = measure_save(name, Path(folder), int(width))
        else:
            found = measure_load(name, Path(folder), int(width), how)
        print(json.dumps(found))
    else:
        sys.exit("to measure: python bench/measure.py --only checkpoints")


if __name__ == "__main__":
    main()
