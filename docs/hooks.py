"""Hooks for links from pages to repository files: the site gets a page for each linked file.

A link such as ``../examples/digits.py`` works in the repository and on the site, without an address
of a code host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}
_DIRECTIVE = re.compile(r"^(::: .+)\n(?!    )", re.M)  # without options
_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):(<code>)~?")
_PICTURES = (".svg", ".png")
#: Sections of the reference whose classes are shown without the arguments of their common parent.
_ERRORS = re.compile(r"^## (?:Errors|How a world can fail)\n.*?(?=^## |\Z)", re.M | re.S)
_BARE = "    options: { members: false, merge_init_into_class: false, show_signature: false }"
#: At the top of a listing: the search shows it after the pages that explain the same.
_BEHIND_PAGES = "---\nsearch: { boost: 0.05 }\n---\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to, directly or through another."""
    waiting = [ROOT / target for page in files.documentation_pages()
               for target in _outside(page.content_string, DOCS / page.src_uri)]  # fmt: skip
    made: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in made:
            continue
        made.add(path)
        if path.suffix in _PICTURES:
            content: str | bytes = path.read_bytes()
        else:
            content = _shown(path)
            waiting += [ROOT / t for t in _outside(content, path)] if path.suffix == ".md" else []
        files.append(File.generated(config, _place(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links to files outside docs/ into links to their generated pages.

    Errors of the reference that have no options get those of all errors.
    """
    if page.file.src_uri.startswith("reference/"):
        markdown = _ERRORS.sub(lambda found: _DIRECTIVE.sub(rf"\1\n{_BARE}\n", found[0]), markdown)
    source = page.file.src_uri
    here = (
        ROOT / source.removeprefix("source/").removesuffix(".md")
        if (source.startswith("source/"))
        else DOCS / source
    )

    def pointed(link: re.Match[str]) -> str:
        path = _target(link[2], here)
        if path is None:
            return link[0]
        inside = path.is_relative_to(DOCS)
        goal = path.relative_to(DOCS).as_posix() if inside else _place(path)
        return link[1] + os.path.relpath(goal, Path(source).parent) + link[3]

    return _LINK.sub(pointed, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Correct two things that this Markdown renders differently.

    Roles of docstrings such as ``:func:`` are removed, and escaped bars in tables are unescaped.
    """
    html = _ROLE.sub(r"\1", html)
    html = re.sub(r"<td>.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html)
    # Messages are longer than a line, so they have to wrap.
    return f'<div class="errors">{html}</div>' if page.file.src_uri == "errors.md" else html


def _outside(text: str, page: Path) -> list[Path]:
    found = [_target(link[2], page) for link in _LINK.finditer(text)]
    return [p.relative_to(ROOT) for p in found if p is not None and not p.is_relative_to(DOCS)]


def _target(link: str, page: Path) -> Path | None:
    """Return the file of this repository that `page` links to; None for other links."""
    if re.match(r"[a-z]+:", link):
        return None
    path = Path(os.path.normpath(page.parent / link))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _place(path: Path) -> str:
    """Return the path of a repository file on the site."""
    name = path.relative_to(ROOT).as_posix()
    return f"source/{name}" if path.suffix in _PICTURES else f"source/{name}.md"


def _shown(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{_BEHIND_PAGES}# {name}\n\n`````{language}\n{text}\n`````\n"
