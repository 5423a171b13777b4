"""Write docs/images/viewer.png and docs/images/report.png, which show a dataset made from data/conversations.jsonl.

    python scripts/screenshots.py [FOLDER]    write both images into FOLDER; the default is docs/images

Requires Chromium and Playwright, like the browser tests in tests/show.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chatmill import load_format, read_records
from chatmill.format import record_texts
from chatmill.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "show"))

from viewing import open_browser, viewer, watched_page  # noqa: E402 (the harness of the browser tests)

RECORDS, DATASET, TOKENIZER = "conversations.jsonl", "data/chat", "tokenizer.json"
EPISODE = "#/episodes?split=train&episode=0&token=24"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    images = parser.parse_args().folder
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_data(folder)
        with open_browser() as browser, viewer(Path(DATASET), folder) as url:
            for page, image, ready, height in [
                (url + EPISODE, "viewer.png", ".sentence", 800),
                ((folder / "report.html").as_uri(), "report.png", "svg", 960),
            ]:
                viewport = {"width": 1280, "height": height}
                with watched_page(browser, viewport=viewport, color_scheme="light") as watched:
                    watched.page.goto(page)
                    watched.page.wait_for_selector(ready)
                    watched.page.wait_for_selector("#indexing", state="hidden")
                    watched.page.screenshot(path=images / image)
    return 0


def prepare_data(folder: Path) -> None:
    """Write a dataset and its report into a folder, with a tokenizer trained on the records."""
    shutil.copy(ROOT / "data" / RECORDS, folder)
    texts = [text for record in read_records(folder / RECORDS) for text in record_texts(record)]
    control = list(load_format("chatml").tokens.values())
    (folder / TOKENIZER).write_bytes(train_bpe(texts, vocab_size=1000, control=control))
    for command in [
        ["prepare", RECORDS, "-o", DATASET, "--tokenizer", TOKENIZER, "--val-split", "0.1", "--max-tokens", "96"],
        ["report", DATASET, "-o", "report.html"],
    ]:
        chatmill = Path(sys.executable).with_name("chatmill")
        subprocess.run([chatmill, *command], cwd=folder, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
