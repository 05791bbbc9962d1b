"""A run written down: read from YAML, TOML or JSON, and written with a comment for each key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims.errors import ConfigurationError

from .accelerate_config import from_file, is_accelerates, nearest
from .options import BY_KEY, FAMILIAR, OPTIONS, Option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def read(path: str) -> dict[str, Any]:
    """Return the values in the file, by key; only those that it names.

    A file that ``accelerate config`` has written is understood as far as it has an equivalent.

    :raises ConfigurationError: if the file cannot be read, or a key or value is not one; naming
        file, key, and the nearest key there is.
    """
    said = _parsed(Path(path))
    if is_accelerates(said):
        said = from_file(said, path)
    values: dict[str, Any] = {}
    for key, value in said.items():
        option = BY_KEY.get(key.replace("-", "_"))
        if option is None:
            raise ConfigurationError(
                f"{path}: there is no key {key!r}{nearest(key, list(BY_KEY)) or ';'} "
                f"`syncprims config` writes a file with all of them"
            )
        try:
            if value is not None:
                values[option.key] = option.read(value)
        except ValueError as error:
            raise ConfigurationError(f"{path}: {key}: {error}") from None
    return values


def _parsed(path: Path) -> dict[str, Any]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ConfigurationError(
            f"{path}: a file that describes a run is called *.yaml, *.toml or *.json"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}; `syncprims config` writes such a file"
        ) from error
    try:
        said = reader(text)
    except ImportError:
        raise ConfigurationError(
            f"{path}: reading YAML needs a package: pip install 'syncprims[config]'. "
            f"A file *.toml needs none"
        ) from None
    except Exception as error:  # each reader has its own, and none of another kind
        raise ConfigurationError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if said is None:
        return {}
    if not isinstance(said, dict):
        raise ConfigurationError(f"{path}: it has to be keys with values, as in `ranks: 4`")
    return {str(key): value for key, value in said.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": json.loads,
}  # fmt: skip
SUFFIXES = frozenset(_READERS)  #: by which a file that describes a run is known


# -- writing -----------------------------------------------------------------------------------


def written(values: Mapping[str, Any], suffix: str) -> str:
    """Return a file with these values; what they do not name stands there as a comment.

    :raises ConfigurationError: if the name ends with neither ``.yaml`` nor ``.toml``.
    """
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigurationError(f"a run is written to *.yaml or *.toml, and not to *{suffix}")
    equals = " =" if suffix == ".toml" else ":"
    lines = ["# What `syncprims run --config FILE` starts. Flags override what stands here."]
    section = ""
    for option in OPTIONS:
        if option.section == FAMILIAR and option.key not in values:
            continue
        if option.section != section:
            section = option.section
            lines += ["", f"# -- {section}"]
        lines.append(f"# {option.help}")
        if option.key in values:
            lines.append(f"{option.key}{equals} {_literal(values[option.key], option)}")
        else:
            lines.append(f"#{option.key}{equals} {_EXAMPLES.get(option.key, 'false')}")
    return "\n".join(lines) + "\n"


_EXAMPLES = {
    "ranks": "4", "backend": '"file"', "timeout": "600", "gpus": '"0,1"', "threads": "4",
    "mixed_precision": '"bf16"', "trace": '"trace"', "nodes": "2", "node_rank": "0",
    "rendezvous": '"node0:29500"', "max_restarts": "0", "script": '"train.py"',
    "args": '["--lr", "0.1"]',
}  # fmt: skip


def _literal(value: Any, option: Option) -> str:
    return json.dumps(plain(option.key, value), ensure_ascii=False)  # YAML and TOML read it, too


def plain(key: str, value: Any) -> Any:
    """Return a value as it is written, in a file or on a command line."""
    if key == "rendezvous":
        host, port = value
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ",".join(value) if key == "gpus" else value
