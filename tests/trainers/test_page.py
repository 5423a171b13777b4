from __future__ import annotations

import shutil

import doc_examples
import pytest
from page_sections import HEADINGS, ROOT, run_section


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heading", [heading for heading in HEADINGS if heading != "torchtitan"])
def test_the_examples_of_a_section_run_and_print_what_it_shows(heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_section(heading, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_the_page_about_trl_scripts_run(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("cache"))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    doc_examples.run(ROOT / "docs/how-to/trl-script.md", tmp_path)
