"""``syncprims config``: write a run down."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._world.host import count_processors, find_visible_gpus
from syncprims.errors import ConfigurationError

from . import accelerate_config, config_file
from .options import BY_KEY
from .run import add_options, said

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from .parser import CommandParser

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
#: What a terminal is asked: the key, and the question.
QUESTIONS = (
    ("nodes", "How many machines"),
    ("rendezvous", "Where they meet: an address of machine 0, and a free port there"),
    ("ranks", "How many ranks on each machine"),
    ("gpus", "CUDA devices (ids as 0,1, or all; empty: none)"),
    ("mixed_precision", "Mixed precision (no, bf16 or fp16)"),
    ("threads", "Threads of each rank (empty: the processors are shared out)"),
    ("script", "Script (empty: it is named when the run starts)"),
)


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Describe the command."""
    parser = commands.add_parser(
        "config",
        help="write a file for `syncprims run --config`",
        description="Write down what `syncprims run` is to start: from flags, or by questions on a "
        "terminal. The file has every key there is, with a comment.",
        epilog=EXAMPLES,
        usage="syncprims config [-o FILE] [--force] [flags of run] [SCRIPT [ARGS...]]",
    )
    parser.rewrite = functools.partial(accelerate_config.translate, more=_OWN_FLAGS)
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="run.yaml",
        help="*.yaml, *.toml, or - for the standard output (default: run.yaml)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="write over a file that exists")
    add_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file."""
    told = said(options)
    if "module" not in told:
        _refuse_a_file_for_a_script(told.get("script"))
    values = {**(config_file.read(options.config) if options.config else {}), **told}
    if not values:
        if not sys.stdin.isatty():
            raise ConfigurationError(
                "nothing to write: give flags, as in `syncprims config -n 4 train.py`, or run it "
                "on a terminal, where it asks"
            )
        values = ask(_defaults(options.environ), input)
    for note in accelerate_config.notes(values):
        print(f"syncprims config: {note}", file=sys.stderr)  # noqa: T201
    telling = {key: value for key, value in values.items() if not BY_KEY[key].note}
    _write(telling, options.output, force=options.force)
    return 0


def _refuse_a_file_for_a_script(script: str | None) -> None:
    if script is not None and Path(script).suffix in config_file.SUFFIXES:
        raise ConfigurationError(
            f"{script} stands where the script does, and is no Python: name the file to write with "
            f"-o {script}, one to read with --config {script}"
        )


def ask(defaults: Mapping[str, Any], reply: Callable[[str], str]) -> dict[str, Any]:
    """Return the answers to the questions, each asked until it has a valid one.

    :raises ConfigurationError: at the end of the input.
    """
    values: dict[str, Any] = {}
    for key, question in QUESTIONS:
        if key == "rendezvous" and values["nodes"] == 1:
            continue
        default = defaults.get(key)
        shown = "" if default is None else f" [{config_file.plain(key, default)}]"
        while True:
            try:
                said = reply(f"{question}{shown}: ").strip()
            except EOFError:
                raise ConfigurationError(
                    "the questions were not answered; nothing was written"
                ) from None
            if not said:
                if default is not None:
                    values[key] = default
                elif key == "rendezvous":
                    continue  # there is no default for it
                break
            try:
                values[key] = BY_KEY[key].read(said)
                break
            except ValueError as error:
                print(f"  {error}", file=sys.stderr)  # noqa: T201
    return values


def _defaults(environ: Mapping[str, str]) -> dict[str, Any]:
    gpus = find_visible_gpus(environ) or []
    values = {"nodes": 1, "ranks": len(gpus) or count_processors(), "mixed_precision": "no"}
    return {**values, "gpus": tuple(gpus)} if gpus else values


def _write(values: Mapping[str, Any], output: str, *, force: bool) -> None:
    if output == "-":
        sys.stdout.write(config_file.written(values, ".yaml"))
        return
    path = Path(output)
    text = config_file.written(values, path.suffix)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} exists; name another file with -o, or write over it with --force"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from error
    known = " train.py" if "script" not in values else ""
    print(f"wrote {path}; start it with: syncprims run --config {path}{known}")  # noqa: T201
