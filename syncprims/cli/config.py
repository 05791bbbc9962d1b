"""``syncprims config``: write a file that describes a run."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._world.host import processors, visible_gpus
from syncprims.errors import ConfigurationError

from . import accelerate_config, config_file
from .options import BY_KEY, plain_value
from .run import add_options, values_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from .console import CommandParser

EXAMPLES = """\
examples:
  syncprims config                                    on a terminal: asks, and writes run.yaml
  syncprims config -n 4 --mixed-precision bf16 train.py --lr 0.1
  syncprims config -o run.toml -n 4 train.py          TOML: reading it needs no package
  syncprims config --config default_config.yaml -n 4  from accelerate's file, as far as it maps

All flags of `syncprims run` are taken. exit code: 0 if the file is written, else 2."""

_OWN_FLAGS = {
    "-o": ("--output", True),
    "--output": ("--output", True),
    "--force": ("--force", False),
}
#: The questions on a terminal, by key.
QUESTIONS = (
    ("nodes", "How many machines"),
    ("rendezvous", "Where they meet: an address of machine 0, and a free port there"),
    ("ranks", "How many ranks on each machine"),
    ("gpus", "CUDA devices (ids as 0,1, or all; empty: none)"),
    ("mixed_precision", "Mixed precision (no, bf16 or fp16)"),
    ("threads", "Threads of each rank (empty: the processors divided by the ranks)"),
    ("script", "Script (empty: you name it when you start the run)"),
)


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Describe the command."""
    parser = commands.add_parser(
        "config",
        help="write a file for `syncprims run --config`",
        description="Write a file that says what `syncprims run` starts: from flags, or from "
        "questions on a terminal. The file has every key, with a comment.",
        epilog=EXAMPLES,
        usage="syncprims config [-o FILE] [--force] [flags of run] [SCRIPT [ARGS...]]",
    )
    parser.rewrite = functools.partial(accelerate_config.translate, more=_OWN_FLAGS)
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="run.yaml",
        help="*.yaml, *.toml, or - for the standard output (default: run.yaml)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file."""
    flags = values_of(options)
    script = flags.get("script")
    if script and "module" not in flags and Path(script).suffix in config_file.SUFFIXES:
        raise ConfigurationError(
            f"{script} stands where the script does, and is no Python: name the file to write with "
            f"-o {script}, one to read with --config {script}"
        )
    values = {**(config_file.read(options.config) if options.config else {}), **flags}
    if not values:
        if not sys.stdin.isatty():
            raise ConfigurationError(
                "nothing to write: give flags, as in `syncprims config -n 4 train.py`, or run it "
                "on a terminal, where it asks"
            )
        values = ask(_defaults(options.environ), input)
    for note in accelerate_config.notes(values):
        print(f"syncprims config: {note}", file=sys.stderr)  # noqa: T201
    effective = {key: value for key, value in values.items() if not BY_KEY[key].note}
    _write(effective, options.output, force=options.force)
    return 0


def ask(defaults: Mapping[str, Any], reply: Callable[[str], str]) -> dict[str, Any]:
    """Ask each question until the answer is valid, and return the answers by key.

    :raises ConfigurationError: at the end of the input.
    """
    values: dict[str, Any] = {}
    for key, question in QUESTIONS:
        if key == "rendezvous" and values["nodes"] == 1:
            continue
        default = defaults.get(key)
        shown = "" if default is None else f" [{plain_value(key, default)}]"
        while True:
            try:
                text = reply(f"{question}{shown}: ").strip()
                if text:
                    values[key] = BY_KEY[key].read(text)
                elif default is not None:
                    values[key] = default
                elif key == "rendezvous":
                    continue  # it has no default
                break
            except EOFError:
                raise ConfigurationError(
                    "the questions were not answered; nothing was written"
                ) from None
            except ValueError as error:
                print(f"  {error}", file=sys.stderr)  # noqa: T201
    return values


def _defaults(environ: Mapping[str, str]) -> dict[str, Any]:
    gpus = visible_gpus(environ) or []
    values = {"nodes": 1, "ranks": len(gpus) or processors(), "mixed_precision": "no"}
    return {**values, "gpus": tuple(gpus)} if gpus else values


def _write(values: Mapping[str, Any], output: str, *, force: bool) -> None:
    if output == "-":
        sys.stdout.write(config_file.render(values, ".yaml"))
        return
    path = Path(output)
    text = config_file.render(values, path.suffix)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} exists; name another file with -o, or write over it with --force"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from error
    script = " train.py" if "script" not in values else ""
    print(f"wrote {path}; start it with: syncprims run --config {path}{script}")  # noqa: T201
