"""Print the section of CHANGELOG.md for a release, for use as release notes.

    python scripts/release_notes.py v0.1.0 [--root FOLDER]

Exits with 1 if the tag is not `v` followed by `chatmill.__version__`, or if the changelog has no section `## [0.1.0] -
YYYY-MM-DD`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version_of(root: Path) -> str:
    """Return `chatmill.__version__` without importing chatmill."""
    text = (root / "src" / "chatmill" / "__init__.py").read_text("utf-8")
    return re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)[0]


def notes(root: Path, tag: str) -> str:
    version = version_of(root)
    if tag != f"v{version}":
        sys.exit(f'tag {tag}: chatmill.__version__ is "{version}"; expected the tag v{version}')
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading.strip()) and text.strip():
            return text.strip()
    sys.exit(f"CHANGELOG.md: no section for {version}; expected ## [{version}] - YYYY-MM-DD followed by the changes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the section of CHANGELOG.md for this version.")
    parser.add_argument("tag", help="the tag of the release, which is v followed by the version")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    print(notes(options.root, options.tag))


if __name__ == "__main__":
    main()
