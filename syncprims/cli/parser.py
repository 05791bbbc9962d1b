"""The parser of one command."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"max_help_position": 30, **options})


class CommandParser(argparse.ArgumentParser):
    """A parser that takes whole flags only, so that a new flag never changes an old line's meaning.

    `rewrite` may put a line into the spelling that is known here, before it is parsed.
    """

    def __init__(self, **options: Any) -> None:
        fixed: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False}
        super().__init__(**fixed, **options)
        self.rewrite: Callable[[Sequence[str]], list[str]] | None = None

    def parse_known_args(  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, after the line is rewritten."""
        line = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self.rewrite(line) if self.rewrite else line, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` says more\n")


def checked(read: Callable[[object], Any]) -> Callable[[str], Any]:
    """Return `read` as argparse wants it: with its own words in the error."""

    def check(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check
