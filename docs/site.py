"""Hooks of mkdocs.yml: pages that lie outside of docs/, where GitHub shows them too, and the reference of all keys.

Every page keeps the links that work in the repository; here they are turned into those of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from sagetrain.config.reference import markdown

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "kernels/*.md", "results/**/*.md", "results/**/*.png")
LATER = ("results/", "kernels/NOTES", "CHANGELOG", "CONTRIBUTING")
"""Research and history, which a search finds after the guides and the keys."""
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """README.md is the site's first page; everything else is where it is in the repository, docs/ at the top."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    files.append(File.generated(config, "reference.md", content=markdown()))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between pages for the site; of those to code their text is left."""
    here = page.file.src_uri
    at = {"index.md": "README.md"}.get(here, here if (ROOT / here).exists() else f"docs/{here}")

    def on_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(at), match[2]))
        page_there = "index.md" if target == "README.md" else target.removeprefix("docs/")
        if files.get_file_from_path(page_there) is None:
            return match[1]
        return f"[{match[1]}]({posixpath.relpath(page_there, posixpath.dirname(here) or '.')}{match[3] or ''})"

    page.meta["search"] = {"boost": 0.1 if here.startswith(LATER) else 0.5 if here == "reference.md" else 1.0}
    return LINK.sub(on_site, markdown)
