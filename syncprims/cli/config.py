"""Write a file that says what `syncprims run` starts, for its flag --config.

The file has every key, with a comment. The keys of the given flags are set in it.

examples:
  syncprims config                                    run.yaml, in which nothing is set yet
  syncprims config -n 4 --mixed-precision bf16 train.py --lr 0.1
  syncprims config -o run.toml -n 4 train.py          TOML: reading it needs no package
  syncprims config --config default_config.yaml -n 4  from accelerate's file, as far as it maps

All flags of `syncprims run` are taken. exit code: 0 if the file is written, else 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from syncprims.errors import ConfigurationError, install

from . import accelerate_config
from .console import CommandParser
from .options import ACCELERATE, BY_KEY, OPTIONS, add_options, plain_value, values_of

#: The module and its function that parse a file with this suffix; imported when it is read.
_PARSERS = {
    ".yaml": ("yaml", "safe_load"),
    ".yml": ("yaml", "safe_load"),
    ".toml": ("tomllib", "loads"),
    ".json": ("json", "loads"),
}


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "syncprims config [-o FILE] [flags of run] [SCRIPT [ARGS...]]"
    parser.set_defaults(explain_flag=accelerate_config.explain_flag)
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="run.yaml",
        help="*.yaml, *.toml, or - for the standard output (default: run.yaml)",
    )  # fmt: skip
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Write the file."""
    flags = values_of(options)
    script = flags.get("script")
    if script and "module" not in flags and Path(script).suffix in _PARSERS:
        raise ConfigurationError(
            f"{script} stands where the script does, and is no Python: name the file to write with "
            f"-o {script}, one to read with --config {script}"
        )
    values = {**(read(options.config) if options.config else {}), **flags}
    for note in accelerate_config.notes(values):
        print(f"syncprims config: {note}", file=sys.stderr)  # noqa: T201
    effective = {key: value for key, value in values.items() if not BY_KEY[key].note}
    if options.output == "-":
        sys.stdout.write(render(effective, ".yaml"))
        return 0
    path = Path(options.output)
    text = render(effective, path.suffix)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigurationError(
            f"{path} exists and is not overwritten; remove it, or name another file with -o"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from error
    name = " train.py" if "script" not in effective else ""
    print(f"wrote {path}; start it with: syncprims run --config {path}{name}")  # noqa: T201
    return 0


# -- the file ----------------------------------------------------------------------------------


def read(path: str) -> dict[str, Any]:
    """Return the values in the file, by key; only those that it sets.

    A file of ``accelerate config`` is converted where it has an equivalent.

    :raises ConfigurationError: if the file cannot be read, or a key or value is wrong; naming the
        file, the key, and the nearest known key.
    """
    written = accelerate_config.convert_file(_parse(Path(path)), path)
    values: dict[str, Any] = {}
    for key, value in written.items():
        option = BY_KEY.get(key.replace("-", "_"))
        if option is None:
            raise ConfigurationError(
                f"{path}: there is no key {key!r}{accelerate_config.suggest(key, list(BY_KEY))} "
                f"`syncprims config` writes a file with all of them"
            )
        try:
            if value is not None:
                values[option.key] = option.read(value)
        except ValueError as error:
            raise ConfigurationError(f"{path}: {key}: {error}") from None
    return values


def _parse(path: Path) -> dict[str, Any]:
    if path.suffix not in _PARSERS:
        raise ConfigurationError(
            f"{path}: a file that describes a run is called *.yaml, *.toml or *.json"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}; `syncprims config` writes such a file"
        ) from error
    module, function = _PARSERS[path.suffix]
    try:
        values: object = getattr(importlib.import_module(module), function)(text)
    except ImportError:
        raise ConfigurationError(
            f"{path}: reading YAML needs a package: {install('config')}. A file *.toml needs none"
        ) from None
    except Exception as error:  # each parser raises errors of its own
        raise ConfigurationError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: it has to be keys with values, as in `ranks: 4`")
    return {str(key): value for key, value in values.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def render(values: Mapping[str, Any], suffix: str) -> str:
    """Return the text of a file with these values; every other key is a comment in it.

    :raises ConfigurationError: if the suffix is neither ``.yaml`` nor ``.toml``.
    """
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigurationError(f"a run is written to *.yaml or *.toml, and not to *{suffix}")
    equals = " =" if suffix == ".toml" else ":"
    lines = ["# For `syncprims run --config FILE`, whose flags override these values."]
    section = ""
    for option in OPTIONS:
        if option.section == ACCELERATE and option.key not in values:
            continue
        if option.section != section:
            section = option.section
            lines += ["", f"# -- {section}"]
        lines.append(f"# {option.help}")
        if option.key in values:
            lines.append(
                f"{option.key}{equals} {_quote(plain_value(option.key, values[option.key]))}"
            )
        else:
            lines.append(f"#{option.key}{equals} {option.example}")
    return "\n".join(lines) + "\n"


def _quote(value: Any) -> str:
    """Return `value` as JSON that YAML and TOML read in the same way."""
    text = json.dumps(value, ensure_ascii=False)
    # Both refuse or change some characters that JSON allows, such as a line separator.
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)
