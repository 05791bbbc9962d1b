"""``syncprims completion``: print a shell's completion script, which the library shtab writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError

from .options import OPTIONS

if TYPE_CHECKING:
    import argparse

    from .console import CommandParser

SHELLS = ("bash", "zsh", "fish", "tcsh")
HELP = """\
bash:  syncprims completion bash > ~/.local/share/bash-completion/completions/syncprims
zsh:   syncprims completion zsh > ~/.zfunc/_syncprims     (with ~/.zfunc in $fpath)
fish:  syncprims completion fish > ~/.config/fish/completions/syncprims.fish
tcsh:  syncprims completion tcsh > ~/.syncprims.completion.csh (and source it)

For this shell only: eval "$(syncprims completion bash)". It needs a package:
pip install 'syncprims[completion]'."""

#: What shtab completes for an argument with this placeholder.
_FILES = {"FILE": "file", "SCRIPT [ARGS...]": "file", "DIR": "directory"}
# shtab goes on to complete flags behind the script, where they are the script's own.
_BASH = """
_syncprims() {
  local i valued=' %s '
  if [[ ${COMP_WORDS[1]} == run || ${COMP_WORDS[1]} == config ]]; then
    for (( i = 2; i < COMP_CWORD; i++ )); do
      case "${COMP_WORDS[i]}" in
        -*) [[ $valued == *" ${COMP_WORDS[i]} "* ]] && (( i++ ));;
        *) COMPREPLY=(); return;;
      esac
    done
  fi
  _shtab_syncprims
}
complete -o bashdefault -o default -F _syncprims syncprims
"""


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Describe the command."""
    parser = commands.add_parser(
        "completion",
        help="print a script that makes a shell complete these commands",
        description="Print a script that makes the shell complete commands, flags and values.",
        epilog=HELP,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run, commands=commands)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise ConfigurationError(
            "the completion script is written by a package: pip install 'syncprims[completion]'"
        ) from None
    for command in options.commands.choices.values():
        for action in command._actions:
            if action.metavar in _FILES:
                action.complete = _FILES[action.metavar]
    print(shtab.complete(options.parser, options.shell))  # noqa: T201
    if options.shell == "bash":
        flags = [
            name for option in OPTIONS if option.metavar for name in (option.short, option.flag)
        ]
        print(_BASH % " ".join(filter(None, flags)), end="")  # noqa: T201
    return 0
