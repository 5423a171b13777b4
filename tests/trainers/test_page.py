"""The examples of docs/how-to/integrations.md run with the real libraries."""

from __future__ import annotations

import pytest
from page_sections import HEADINGS, run_section


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("heading", [heading for heading in HEADINGS if heading != "torchtitan"])
def test_the_examples_of_a_section_run_and_print_what_it_shows(heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_section(heading, tmp_path)
