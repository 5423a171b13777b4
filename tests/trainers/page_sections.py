"""Run the sections of docs/how-to/integrations.md, each of which is a complete example."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import doc_examples

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "integrations.md"
HEADINGS = re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.MULTILINE)


def run_section(heading: str, folder: Path) -> None:
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("cache"))
    os.chdir(folder)
    page = PAGE.read_text("utf-8")
    kept, keeps = [], True
    for line in page.splitlines():
        if line.startswith("## "):
            keeps = line == f"## {heading}"
        # Replace all other lines with empty lines, so that line numbers in errors match the page.
        kept.append(line if keeps else "")
    section = folder / PAGE.name
    section.write_text("\n".join(kept) + "\n", "utf-8")
    doc_examples.run(section, folder)
