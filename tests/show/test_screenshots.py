from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from viewing import chromium

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ["report.png", "viewer.png"]
MAX_BYTES = 300_000


def assert_is_a_picture(path: Path) -> None:
    image = path.read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    assert width == 1280
    assert 600 <= height <= 1000
    # A screenshot of an empty page has only about a tenth of this minimum size.
    assert 50_000 < len(image) < MAX_BYTES


@pytest.mark.parametrize("name", IMAGES)
def test_a_picture_in_the_docs_is_a_png_of_moderate_size(name):
    assert_is_a_picture(ROOT / "docs" / "images" / name)


def test_the_script_takes_every_picture_in_the_docs(tmp_path):
    chromium()
    command = [sys.executable, ROOT / "scripts" / "screenshots.py", tmp_path / "images"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == IMAGES
    assert sorted(path.name for path in (ROOT / "docs" / "images").iterdir()) == IMAGES
    for name in IMAGES:
        assert_is_a_picture(tmp_path / "images" / name)
