"""Hooks of the site: pages that are files of the repository, links that lead out of ``docs``, docstrings as pages.

``index.md``, ``contributing.md`` and ``changelog.md`` say in their front matter which file they show. A link to a file
outside ``docs`` becomes one to the repository, if the file exists; otherwise it stays, and ``--strict`` refuses it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
_SHIM = "https://unpkg.com/iframe-worker/shim"


def repository() -> str:
    """Return the address of the repository, which ``pyproject.toml`` holds once."""
    found = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no Repository among [project.urls]; put it back")
    return found[1]


def moved(text: str, folder: Path) -> str:
    """Return a page whose relative links are those of the site.

    Args:
        text: the page, in Markdown.
        folder: of the file that the links are relative to.
    """

    def link(found: re.Match[str]) -> str:
        target, anchor = found[2], found[3] or ""
        path = (folder / target).resolve()
        if "://" in target or not path.exists() or not path.is_relative_to(ROOT):
            return found[0]
        own = _shown_as(path)
        address = f"{repository()}/blob/main/{path.relative_to(ROOT).as_posix()}" if own is None else own
        return f"{found[1]}{address}{anchor}{found[4]}"

    return _LINK.sub(link, text)


def _shown_as(path: Path) -> str | None:
    """Return the page that shows a file, relative to ``docs``; None for one outside the site."""
    shown = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return shown.get(path.relative_to(ROOT).as_posix())


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Show the file that a page names, and lead its links to where they are."""
    del config, files
    source = page.meta.get("shows")
    folder = ROOT if source else (DOCS / page.file.src_uri).parent
    text = (ROOT / source).read_text(encoding="utf-8") if source else markdown
    text = moved(text, folder)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"(\]\()((?:api/)?[\w]+\.md|images/)", rf"\1{up}\2", text) if up else text


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Take the script that lets search run without a server from the site itself."""
    del config
    return output.replace(_SHIM, "../" * page.file.src_uri.count("/") + "search_worker.js")


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """The same for pages that are no document, such as the one for an address that does not exist."""
    del template_name, config
    return output_content.replace(_SHIM, "search_worker.js")


def as_markdown(text: str) -> str:
    """Return a docstring whose doctests stand between fences, and without the ``::`` before literal blocks.

    >>> as_markdown("Double.\\n\\n>>> f(1)\\n[2]").splitlines()
    ['Double.', '', '```pycon', '>>> f(1)', '[2]', '```']
    """
    lines: list[str] = []
    fence: str | None = None
    for line in text.splitlines():
        if fence is None and line.lstrip().startswith(">>> "):
            fence = line[: len(line) - len(line.lstrip())]
            lines.append(f"{fence}```pycon")
        elif fence is not None and not line.strip():
            lines.append(f"{fence}```")
            fence = None
        lines.append(line)
    if fence is not None:
        lines.append(f"{fence}```")
    return re.sub(r"^\s*::\n", "", re.sub(r"(\S)::$", r"\1:", "\n".join(lines), flags=re.MULTILINE), flags=re.MULTILINE)
