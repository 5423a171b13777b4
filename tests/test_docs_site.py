from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_public_api import PACKAGES

ROOT = Path(__file__).resolve().parents[1]


class Loader(yaml.SafeLoader):
    """A YAML loader for mkdocs.yml that reads a `!!python` tag as the name of its function."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader=Loader)
PAGES = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}


def navigation_pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in navigation_pages(part)]


def test_every_page_is_in_the_navigation_once():
    pages = navigation_pages(CONFIG["nav"])
    assert sorted(pages) == sorted(PAGES)
    assert len(pages) == len(set(pages))


def test_the_index_pages_link_to_every_page():
    api = {page for page in PAGES if page.startswith("reference/api/")}
    assert linked_pages("index.md") >= PAGES - api - {"index.md"}
    assert "reference/api/index.md" in linked_pages("index.md")
    assert linked_pages("reference/api/index.md") == {page.rpartition("/")[2] for page in api} - {"index.md"}


def linked_pages(page: str) -> set[str]:
    return set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / page).read_text("utf-8")))


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_begins_with_a_title_and_a_sentence_about_its_purpose(page):
    text = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / page).read_text("utf-8"), flags=re.DOTALL)
    title, opening = [block.strip() for block in text.split("\n\n") if block.strip()][:2]
    assert title.startswith("# ")
    assert re.match(r"[\w`\[*]", opening), opening
    assert re.search(r"[.?:](\s|$)", opening), opening


def test_every_exported_name_is_on_an_api_page():
    pages = {page.name: page.read_text("utf-8") for page in (ROOT / "docs/reference/api").glob("*.md")}
    described = {name for text in pages.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    for package in ("chatmill", *(f"chatmill.{name}" for name in PACKAGES)):
        text = pages[package.rpartition(".")[2] + ".md"]
        for name in importlib.import_module(package).__all__:
            linked = f"[`{name}`][chatmill.{name}]" in text and f"chatmill.{name}" in described
            assert linked or f"{package}.{name}" in described, f"{package}.{name}"
    for name in ("hf.TrainRows", "trl.SFTRows", "accelerate.train_loader", "lightning.EpisodeDataModule"):
        assert f"chatmill.integrations.{name}" in described


@pytest.mark.parametrize("script", ["api_pages.py", "mask_picture.py"])
def test_generated_files_are_up_to_date(script):
    done = subprocess.run([sys.executable, f"scripts/{script}", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_page_links_to_a_file_outside_docs():
    # A relative link to a file outside docs/ works in the repository but not on the site.
    docs = ROOT / "docs"
    links = [
        (page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s#:]+)", (docs / page).read_text("utf-8"))
    ]
    assert [
        link for page, link in links if not (docs / page).parent.joinpath(link).resolve().is_relative_to(docs)
    ] == []


def test_no_setting_loads_something_from_the_web():
    assert CONFIG["theme"]["font"] is False
    search, mkdocstrings = CONFIG["plugins"]
    assert search == "search"
    assert mkdocstrings["mkdocstrings"]["handlers"]["python"]["inventories"] == []
    assert not {"extra_javascript", "extra_css"} & CONFIG.keys()
