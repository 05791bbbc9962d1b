"""Every code block of the README and the documentation does what its page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.pages import (
    PAGES,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    matches,
    name,
    write_files,
)
from support.rank_environment import clean_environ

from syncprims.testing import run_world

#: Programs that are really run; of the others it is checked that what they name is there.
RUN = {"syncprims", "python", "pytest", "torchrun", "bash", "printf"}
CHECKED = {"pip", "make", "sbatch"}

LANGUAGES = {"python", "console", "text", "toml", "yaml", "bash", "json", "diff"}

each_page = pytest.mark.parametrize("page", PAGES, ids=name)


def on(page: Path, *languages: str) -> list[Block]:
    return [b for b in blocks(page) if b.language in languages and "not run" not in b.marks]


def of(*languages: str) -> pytest.MarkDecorator:
    """Parametrize by the pages that have such blocks."""
    return pytest.mark.parametrize("page", [p for p in PAGES if on(p, *languages)], ids=name)


@each_page
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{name(page)}:{block.line}: {block.language!r}"
        assert len(block.marks.get("not run", "a reason, in words")) > 15, block


def segments(page: Path) -> list[tuple[str, list[Block]]]:
    """Return the Python blocks that run together, with the world of each such group."""
    found: list[tuple[str, list[Block]]] = [("1", [])]
    for block in on(page, "python"):
        if "ranks" in block.marks:
            found.append((block.marks["ranks"], []))
        if block.file is None:
            found[-1][1].append(block)
    return [segment for segment in found if segment[1]]


@of("python")
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran = 0
    for world, group in segments(page):
        size, _, kind = world.partition(" ")

        def program(group: list[Block] = group) -> int:
            namespace: dict[str, Any] = {"__name__": "page"}
            for block in group:
                run_block(page, block, namespace)
            return len(group)

        if size == "0":
            ran += program()
            continue
        results = run_world(program, int(size), kind="processes" if kind else "threads")
        assert len(set(results)) == 1
        ran += results[0]
    assert ran == len([b for b in on(page, "python") if b.file is None])


def run_block(page: Path, block: Block, namespace: dict[str, Any]) -> None:
    code = compile("\n" * (block.line - 1) + block.code, name(page), "exec", dont_inherit=True)
    wanted = block.marks.get("raises")
    try:
        exec(code, namespace)
    except Exception as error:
        if type(error).__name__ != wanted:
            raise
    else:
        assert wanted is None, f"{name(page)}:{block.line} does not raise {wanted}"


def shims(folder: Path) -> Path:
    """Return a folder with the programs that this environment's Python has."""
    modules = {
        "python": "",
        "syncprims": "-m syncprims",
        "pytest": "-m pytest",
        "torchrun": "-m torch.distributed.run",
    }
    folder.mkdir()
    for program, module in modules.items():
        path = folder / program
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        path.chmod(0o755)
    return folder


@of("console")
def test_commands_run_and_say_what_is_shown(page: Path, tmp_path: Path) -> None:
    try_commands(page, tmp_path, slow=False)


SLOW = [page for page in PAGES if any("slow" in block.marks for block in on(page, "console"))]


@pytest.mark.soak
@pytest.mark.parametrize("page", SLOW, ids=name)
def test_slow_commands_run_as_well(page: Path, tmp_path: Path) -> None:
    try_commands(page, tmp_path, slow=True)


def try_commands(page: Path, tmp_path: Path, *, slow: bool) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    others = ("PYTEST", "COV", "COLUMNS", "CI")
    environ = {k: v for k, v in clean_environ().items() if not k.startswith(others)}
    environ["PATH"] = f"{shims(tmp_path / 'bin')}:{environ['PATH']}"
    environ["PYTEST_DEBUG_TEMPROOT"] = str(tmp_path)
    environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}:{environ['PYTHONPATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for block in on(page, "console"):
        write_files(page, folder, block.line)
        if slow is not ("slow" in block.marks):
            continue
        for command in commands(block):
            if programs(command.text) <= RUN:
                run_command(page, command, folder, environ)
            else:
                check_command(page, command, folder, Path(environ["PYTHONPATH"].split(":")[0]))


def programs(text: str) -> set[str]:
    """Return the programs that a command line calls."""
    words = [re.split(r"[/\s]", part.strip()) for part in re.split(r"&&|\||;", text)]
    return {next(w for w in parts if "=" not in w) for parts in words}


def run_command(page: Path, command: Command, folder: Path, environ: dict[str, str]) -> None:
    place = f"{name(page)}:{command.line}"
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == command.code, f"{place} ended with {done.returncode}:\n{said}"
    for shown in command.shown:
        if shown.strip(" E[]rank0123456789>").strip() not in ("", "..."):
            found = any(matches(shown, line) for line in said.splitlines())
            assert found, f"{place} shows what is not said: {shown!r}\n\n{said}"


def check_command(page: Path, command: Command, folder: Path, site: Path) -> None:
    """See that what a command names is there: extras, targets, files."""
    place = f"{name(page)}:{command.line}"
    for part in re.split(r"&&", command.text):
        program, *words = shlex.split(part, comments=True)
        assert program in CHECKED, f"{place}: run {program!r}, or say how to check it"
        if program == "pip":
            check_requirements(place, words)
            if words[-1] == "." and (folder / "pyproject.toml").exists():
                install(folder, site)  # what the page itself has made
        elif program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(words) <= set(targets), f"{place}: {words}"
        elif program == "sbatch":
            assert (folder / words[-1]).is_file(), f"{place}: no {words[-1]}"


def install(folder: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*command, "--root-user-action=ignore", str(folder)], check=True)


def check_requirements(place: str, words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[0] == "install", place
    for word in words[1:]:
        found = re.fullmatch(r"(syncprims|\.)\[(.*)\]", word)
        if found is not None:
            extras = project["optional-dependencies"].keys()
            assert set(found[2].split(",")) <= extras, f"{place}: {word}"
        else:
            assert re.fullmatch(r"-e|\.|[a-z-]+|https://\S+", word), f"{place}: {word}"


@of("toml", "yaml", "bash", "json")
def test_other_blocks_are_whole(page: Path) -> None:
    for block in on(page, "toml", "yaml", "bash", "json"):
        if block.language == "toml":
            assert tomllib.loads(block.code)
        elif block.language in ("yaml", "json"):
            assert pytest.importorskip("yaml").safe_load(block.code)
        else:
            done = subprocess.run(
                ["bash", "-n"], input=block.code, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{name(page)}:{block.line}: {done.stderr}"


LINK = re.compile(r"\]\(([^)\s]+)\)")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in LINK.findall(text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{name(page)} leads to {link}, which is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)} leads to {link}: no such heading"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as both MkDocs and code hosts make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[`*]|\]\(.*?\)|\[", "", head) for head in heads]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", p).strip().lower()) for p in plain}
