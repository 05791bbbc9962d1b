"""``syncprims completion``: what a shell needs to complete our commands and flags."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from .parser import CommandParser

HELP = """\
bash:  syncprims completion bash > ~/.local/share/bash-completion/completions/syncprims
zsh:   syncprims completion zsh > ~/.zfunc/_syncprims     (with ~/.zfunc in $fpath)
fish:  syncprims completion fish > ~/.config/fish/completions/syncprims.fish

For this shell only: eval "$(syncprims completion bash)". Files are completed where a flag takes
one, and after the script."""


class Flag(NamedTuple):
    """One flag, under all its names."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    takes_file: bool


class Command(NamedTuple):
    """One command."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]  #: that may stand for its first argument; else files


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Describe the command."""
    parser = commands.add_parser(
        "completion",
        help="print what makes a shell complete these commands",
        description="Print a script that makes the shell complete commands, flags and values.",
        epilog=HELP,
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell")

    def run(options: argparse.Namespace) -> int:
        print(SHELLS[options.shell](described(commands)), end="")  # noqa: T201
        return 0

    parser.set_defaults(run=run)


def described(
    commands: argparse._SubParsersAction[CommandParser],  # pyright: ignore[reportPrivateUsage]
) -> list[Command]:
    """Return what the parsers know, which nothing but their insides tells."""
    helps = {a.dest: a.help or "" for a in commands._choices_actions}  # pyright: ignore[reportPrivateUsage]
    found: list[Command] = []
    for name, parser in commands.choices.items():
        flags: list[Flag] = []
        words: tuple[str, ...] = ()
        for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
            about = " ".join((action.help or "").replace("%%", "%").split())
            choices = tuple(map(str, action.choices or ()))
            if action.option_strings:
                takes = action.nargs != 0
                a_file = action.metavar in ("FILE", "DIRECTORY")
                flags.append(Flag(tuple(action.option_strings), about, takes, choices, a_file))
            elif choices:
                words = choices
        found.append(Command(name, helps.get(name, ""), tuple(flags), words))
    return found


def _bash(commands: list[Command]) -> str:
    cases: list[str] = []
    for command in commands:
        all_flags = " ".join(name for flag in command.flags for name in flag.names)
        valued = [flag for flag in command.flags if flag.takes_value]
        values = "".join(
            f"          {'|'.join(flag.names)}) words='{' '.join(flag.choices)}'; kind=value;;\n"
            for flag in valued
        )
        cases.append(
            f"    {command.name})\n"
            f"      flags='{all_flags}'\n"
            f"      first='{' '.join(command.words)}'\n"
            f'      case "$previous" in\n{values}          *) ;;\n      esac\n'
            f"      valued=' {' '.join(n for f in valued for n in f.names)} ';;\n"
        )
    names = " ".join(command.name for command in commands)
    return f"""\
# bash completion of syncprims: syncprims completion bash
_syncprims() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=${{COMP_WORDS[1]}} flags='' first='' words='' kind=flag valued='' i
  COMPREPLY=()
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W '{names} --help --version' -- "$current"))
    return
  fi
  case "$command" in
{"".join(cases)}    *) return;;
  esac
  # After the script everything is its own: files, by the shell's default.
  for (( i = 2; i < COMP_CWORD; i++ )); do
    case "${{COMP_WORDS[i]}}" in
      -*) [[ $valued == *" ${{COMP_WORDS[i]}} "* ]] && (( i++ ));;
      *) return;;
    esac
  done
  if [[ $kind == value ]]; then
    [[ $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))
  elif [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
  elif [[ $first ]]; then
    COMPREPLY=($(compgen -W "$first" -- "$current"))
  fi
}}
complete -o default -F _syncprims syncprims
"""


def _zsh(commands: list[Command]) -> str:
    lines = ["#compdef syncprims", "# zsh completion of syncprims: syncprims completion zsh", ""]
    lines += ["_syncprims() {", "  local -a commands", "  commands=("]
    lines += [f"    {_quoted(f'{c.name}:{c.help}')}" for c in commands]
    lines += ["  )", "  if (( CURRENT == 2 )); then"]
    lines += ["    _describe command commands", "    return", "  fi"]
    lines += ["  local command=$words[2]", "  shift words; (( CURRENT-- ))", "  case $command in"]
    for command in commands:
        lines += [f"    {command.name})", "      _arguments -S \\"]
        for flag in command.flags:
            text = flag.help.translate(str.maketrans("[]:", "() "))
            value = ":value:_files" if flag.takes_file else f":value:({' '.join(flag.choices)})"
            for name in flag.names:
                spec = f"({' '.join(flag.names)}){name}[{text}]"
                lines.append(f"        {_quoted(spec + (value if flag.takes_value else ''))} \\")
        rest = f"1:word:({' '.join(command.words)})" if command.words else "*::script:_files"
        lines += [f"        {_quoted(rest)}", "      ;;"]
    lines += ["  esac", "}", ""]
    # Sourced, or found in $fpath and called by its name.
    lines += ['if [[ $funcstack[1] == _syncprims ]]; then _syncprims "$@"', "else"]
    lines += ["  compdef _syncprims syncprims", "fi", ""]
    return "\n".join(lines)


def _fish(commands: list[Command]) -> str:
    lines = ["# fish completion of syncprims: syncprims completion fish"]
    for command in commands:
        about = f"-a {command.name} -d {_quoted(command.help)}"
        lines.append(f"complete -c syncprims -n __fish_use_subcommand -f {about}")
    for command in commands:
        here = f"complete -c syncprims -n '__fish_seen_subcommand_from {command.name}'"
        for flag in command.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = " -r" if flag.takes_file else f" -x -a {_quoted(' '.join(flag.choices))}"
            lines.append(
                f"{here} {names} -d {_quoted(flag.help)}" + (value if flag.takes_value else "")
            )
        if command.words:
            lines.append(f"{here} -f -a {_quoted(' '.join(command.words))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return `text` in single quotes, as all three shells read them."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
