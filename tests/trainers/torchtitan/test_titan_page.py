from __future__ import annotations

from pathlib import Path

import pytest
from cpu_device import without_gpu_settings
from page_sections import run_section
from tokenizers import Tokenizer, models


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_the_section_run_and_print_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without_gpu_settings(monkeypatch)
    assets = tmp_path / "assets" / "debug"
    assets.mkdir(parents=True)
    Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>")).save(str(assets / "tokenizer.json"))
    run_section("torchtitan", tmp_path)
    assert Path("outputs", "checkpoint", "step-4").is_dir()
