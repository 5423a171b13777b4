"""The site of docs/: every page has its place in mkdocs.yml, and nothing in it is loaded from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose `!!python` tags name functions, as plain values."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader=Loader)
PAGES = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}


def named(entry) -> list[str]:
    """The pages of an entry of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named(part)]


def test_every_page_stands_once_in_the_navigation():
    pages = named(CONFIG["nav"])
    assert sorted(pages) == sorted(PAGES)
    assert len(pages) == len(set(pages))


def test_the_front_page_leads_to_every_other():
    front = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert set(re.findall(r"\]\(([\w/-]+\.md)\)", front)) == PAGES - {"index.md"}


def test_no_page_leads_out_of_its_folder():
    # Links to files of the repository work there, and nowhere else.
    docs = ROOT / "docs"
    links = [
        (page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s#:]+)", (docs / page).read_text("utf-8"))
    ]
    assert [
        link for page, link in links if not (docs / page).parent.joinpath(link).resolve().is_relative_to(docs)
    ] == []


def test_nothing_is_loaded_from_elsewhere():
    assert CONFIG["theme"]["font"] is False
    assert CONFIG["plugins"] == ["search"]
    assert not {"extra_javascript", "extra_css"} & CONFIG.keys()
