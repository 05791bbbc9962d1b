"""The stored figures, in one small file. A run can continue, or repeat a part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Store:
    """The figures of every section, each with the state of the machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sections: dict[str, dict[str, Any]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def put(
        self, name: str, data: Mapping[str, Any], state: Mapping[str, str], seconds: float
    ) -> None:
        """Replace the figures of a section, and write the file."""
        self.sections[name] = {**state, "seconds": round(seconds), "data": data}
        text = _compact(json.dumps(self.sections, indent=1))
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._path)

    def has(self, name: str, state: Mapping[str, str]) -> bool:
        """Return whether a section was measured in exactly this state without failures."""
        kept = self.sections.get(name)
        if kept is None or kept["data"].get("failed"):
            return False
        return all(kept[what] == value for what, value in state.items())


def _compact(text: str) -> str:
    """Return JSON with each innermost list on one line, for readable diffs."""
    lines: list[str] = []
    open_list = False
    for line in text.splitlines():
        bare = line.strip()
        if open_list:
            lines[-1] += ("" if lines[-1].endswith("[") or bare.startswith("]") else " ") + bare
        else:
            lines.append(line)
        if bare.endswith("["):
            open_list = True
        elif bare.startswith("]"):
            open_list = False
    return "\n".join(lines) + "\n"
