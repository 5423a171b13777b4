import re
import shutil
import urllib.request
from pathlib import Path
from urllib.parse import unquote

import doc_examples
import pytest

ROOT = Path(__file__).resolve().parents[1]
# Run long pages first; otherwise, all other processes would wait for a long page at the end.
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in sorted(
        (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")),
        key=lambda page: (-page.read_text("utf-8").count("\n$ "), page),
    )
]
# Readers run the examples in the root of the repository, which contains these files and folders.
LINKED = ("scripts", "configs", "train.py")
# The examples on these pages need other trainers, so tests/trainers/test_page.py runs them.
OTHER_TRAINERS = ("docs/how-to/integrations.md", "docs/how-to/trl-script.md")


@pytest.fixture
def reader(tmp_path, monkeypatch):
    # Documented commands write below data/.
    shutil.copytree(ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("cache"))
    for name in LINKED:
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_TRAINERS])
def test_the_examples_of_a_page_run_and_print_what_it_shows(page, reader, request, monkeypatch):
    if page == "docs/how-to/remote.md":
        bucket(request.getfixturevalue("s3"), "team")
        monkeypatch.setenv("CHATMILL_CACHE_DIR", str(reader / "cache"))
    doc_examples.run(ROOT / page, reader)


def bucket(server, name):
    urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/{name}", method="PUT")).close()


@pytest.mark.parametrize("page", PAGES)
def test_no_command_is_shown_that_is_not_run(page):
    assert doc_examples.display_faults((ROOT / page).read_text("utf-8")) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_resolve(page):
    source = ROOT / page
    broken = []
    for link in links(source.read_text("utf-8")):
        file, _, anchor = link.partition("#")
        target = (source.parent / unquote(file)).resolve() if file else source
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(f"{page}: {link}: no such file")
        elif anchor and anchor not in anchors(target.read_text("utf-8")):
            broken.append(f"{page}: {link}: no such heading")
    assert broken == []


def links(page: str) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", doc_examples.prose(page))
    found = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"^\s*\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page: str) -> set[str]:
    """Return the link anchors of a page. The anchor of a heading is in lower case, with hyphens for spaces, without
    punctuation, and with a number if the heading occurs again.
    """
    text = doc_examples.prose(page)
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#+\s+(.*?)\s*#*$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
    return found


# A page with wrong output must fail the test.

GOOD = """
```console
$ printf 'one\\ntwo 2.5 s\\nthree\\n' | tee made.txt
one
two … s
...
$ ls data/primer.jsonl && \\
    exit 2  # exit 2
data/primer.jsonl
```

```python
from pathlib import Path

words = Path("made.txt").read_text().split()
```

```python
print(words[0])
```

It prints

```text
one
```
"""


def run(text: str, folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(text)
    doc_examples.run(page, folder)


def test_commands_and_blocks_of_a_page_share_a_folder_and_a_namespace(reader):
    run(GOOD, reader)


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        ("two … s", "two … m", "page.md:3"),
        ("# exit 2", "# exit 0", "page.md:7"),
        ("$ printf 'one", "$ false && printf 'one", None),
        ("text\none", "text\ntwo", "page.md:19"),
    ],
)
def test_a_page_that_shows_something_else_fails_with_its_line(reader, right, wrong, place):
    assert right in GOOD
    with pytest.raises(AssertionError, match=place):
        run(GOOD.replace(right, wrong), reader)


def test_output_after_a_heading_belongs_to_no_block(reader):
    run("```python\nprint(1)\n```\n# Next\n```text\na drawing\n```\n", reader)


@pytest.mark.parametrize(
    ("block", "faults"),
    [
        ("```sh\nmake test\ngit clone x\n# a comment\n```", 0),
        ("```sh\nchatmill render data/primer.jsonl\n```", 1),
        ("```sh\n$ chatmill render data/primer.jsonl\n```", 1),
        ("```bash\nmake test\n```", 1),
        ("```console\n$ chatmill render data/primer.jsonl\n```", 0),
    ],
)
def test_a_chatmill_command_in_a_block_that_is_not_run_is_a_fault(block, faults):
    assert len(doc_examples.display_faults(block)) == faults


def test_links_and_headings_are_found_outside_code():
    page = "# A `b` & c\n## A\n## A\n[x](#a-1) `[y](z)`\n```text\n# no\n[n](n)\n```\n[w](https://w) ![i](i.png)\n"
    assert links(page + "\n[r]: r.md\n") == ["#a-1", "i.png", "r.md"]
    assert anchors(page) == {"a-b--c", "a", "a-1"}
