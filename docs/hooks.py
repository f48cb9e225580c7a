"""What turns the repository's pages into a site: a hook of MkDocs, used by mkdocs.yml.

Knows: which pages of the repository are the site's, and what their links lead to.  Does not know: looks, navigation.
On the repository's pages every link names a file.  The site holds each file that is linked: README and its like as
pages, whatever else lies outside of docs/ below `files/`, as it is.
"""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
# of Markdown, and of pictures in HTML
LINK = re.compile(r"""(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!\w+:|#)([^)"#\s]+)""")
BADGE = re.compile(r' <a href="\.\./\.\./actions.*?</a>')  # of the last run of CI, which the repository's host knows


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files outside of docs/ that the pages link to, and those that these link to."""
    waiting = [*PAGES, *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    known = set(waiting)
    while waiting:
        name = waiting.pop()
        if not name.startswith("docs/"):
            files.append(File.generated(config, site_path(name), abs_src_path=str(ROOT / name)))
        if name.endswith(".md"):
            linked = {target(name, link) for link in LINK.findall(read(name))}
            new = {path for path in linked - known if not path.startswith("docs/")}
            known |= new
            waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link lead to where its file is on the site; Markdown inside of HTML is Markdown."""
    origin = {site_path(name): name for name in PAGES}.get(page.file.src_uri)
    name = origin or page.file.src_uri.removeprefix("files/")
    name = name if page.file.src_uri.startswith("files/") or origin else f"docs/{name}"

    def on_the_site(link: re.Match[str]) -> str:
        return os.path.relpath(site_path(target(name, link[0])), os.path.dirname(page.file.src_uri) or ".")

    return LINK.sub(on_the_site, BADGE.sub("", markdown)).replace("<details>", '<details markdown="1">')


def read(name: str) -> str:
    """Return a page's Markdown, without badges."""
    return BADGE.sub("", (ROOT / name).read_text(encoding="utf-8"))


def target(page: str, link: str) -> str:
    """Return the path below the repository that a page's link leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def site_path(name: str) -> str:
    """Return where a file of the repository is on the site."""
    return name.removeprefix("docs/") if name.startswith("docs/") else PAGES.get(name, f"files/{name}")
