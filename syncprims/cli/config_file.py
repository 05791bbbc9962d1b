"""The file that describes a run: read from YAML, TOML or JSON, written with a comment per key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims.errors import ConfigurationError

from .accelerate_config import convert_file, is_accelerate_config, suggest
from .options import ACCELERATE, BY_KEY, OPTIONS, plain_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def read(path: str) -> dict[str, Any]:
    """Return the values in the file, by key; only those that it sets.

    A file of ``accelerate config`` is converted where it has an equivalent.

    :raises ConfigurationError: if the file cannot be read, or a key or value is wrong; naming the
        file, the key, and the nearest known key.
    """
    written = _parse(Path(path))
    if is_accelerate_config(written):
        written = convert_file(written, path)
    values: dict[str, Any] = {}
    for key, value in written.items():
        option = BY_KEY.get(key.replace("-", "_"))
        if option is None:
            raise ConfigurationError(
                f"{path}: there is no key {key!r}{suggest(key, list(BY_KEY))} "
                f"`syncprims config` writes a file with all of them"
            )
        try:
            if value is not None:
                values[option.key] = option.read(value)
        except ValueError as error:
            raise ConfigurationError(f"{path}: {key}: {error}") from None
    return values


def _parse(path: Path) -> dict[str, Any]:
    parse = _PARSERS.get(path.suffix)
    if parse is None:
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
        values = parse(text)
    except ImportError:
        raise ConfigurationError(
            f"{path}: reading YAML needs a package: pip install 'syncprims[config]'. "
            f"A file *.toml needs none"
        ) from None
    except Exception as error:  # each parser raises errors of its own
        raise ConfigurationError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: it has to be keys with values, as in `ranks: 4`")
    return {str(key): value for key, value in values.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": json.loads,
}  # fmt: skip
SUFFIXES = frozenset(_PARSERS)  #: of a file that describes a run


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
            # JSON is valid in YAML and TOML, too.
            text = json.dumps(plain_value(option.key, values[option.key]), ensure_ascii=False)
            lines.append(f"{option.key}{equals} {text}")
        else:
            lines.append(f"#{option.key}{equals} {option.example}")
    return "\n".join(lines) + "\n"
