"""The command that prints a script for the shell to complete these commands."""

from __future__ import annotations

import argparse

from syncprims.errors import ConfigurationError

from .console import CommandParser

HELP = """Print a script that makes the shell complete commands, flags and values.

bash:  syncprims completion bash > ~/.local/share/bash-completion/completions/syncprims
zsh:   syncprims completion zsh > ~/.zfunc/_syncprims     (with ~/.zfunc in $fpath)
fish:  syncprims completion fish > ~/.config/fish/completions/syncprims.fish
tcsh:  syncprims completion tcsh > ~/.syncprims.completion.csh (and source it)

For this shell only: eval "$(syncprims completion bash)". It needs a package:
pip install 'syncprims[completion]'."""

SHELLS = ("bash", "zsh", "fish", "tcsh")

#: What shtab completes for an argument with this placeholder.
_FILES = {"FILE": "file", "SCRIPT [ARGS...]": "file", "DIR": "directory"}
# shtab goes on to complete flags behind the script, where they are the script's own.
_BASH = """
_syncprims() {
  local i nargs
  if [[ ${COMP_WORDS[1]} == run || ${COMP_WORDS[1]} == config ]]; then
    for (( i = 2; i < COMP_CWORD; i++ )); do
      [[ ${COMP_WORDS[i]} == -* ]] || { COMPREPLY=(); return; }
      nargs=_shtab_syncprims_${COMP_WORDS[1]}_${COMP_WORDS[i]//[^[:word:]]/_}_nargs
      [[ ${!nargs-1} == 0 ]] || (( i++ ))  # a value follows
    done
  fi
  _shtab_syncprims
}
complete -o bashdefault -o default -F _syncprims syncprims"""


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        raise ConfigurationError(
            "the completion script is written by a package: pip install 'syncprims[completion]'"
        ) from None
    for command in options.commands.values():
        for action in command._actions:
            if action.metavar in _FILES:
                action.complete = _FILES[action.metavar]
    print(shtab.complete(options.parser, options.shell))  # noqa: T201
    if options.shell == "bash":
        print(_BASH)  # noqa: T201
    return 0
