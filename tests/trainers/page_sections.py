"""The sections of docs/how-to/integrations.md are complete examples; each runs with the real library in its own
folder.
"""

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
    """Run the blocks before the first section and those of this section in `folder`, which becomes the current
    folder.
    """
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("cache"))
    os.chdir(folder)
    page = PAGE.read_text("utf-8")
    kept, keeps = [], True
    for line in page.splitlines():
        if line.startswith("## "):
            keeps = line == f"## {heading}"
        # Other lines are left empty, so that errors name the line of the page.
        kept.append(line if keeps else "")
    section = folder / PAGE.name
    section.write_text("\n".join(kept) + "\n", "utf-8")
    doc_examples.run(section, folder)
