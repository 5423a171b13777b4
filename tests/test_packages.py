from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import HeaderParser
from pathlib import Path

import pytest
import yaml

import chatmill

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
WORKFLOWS = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in ROOT.glob(".github/workflows/*.yml")}
WHEEL_METADATA = """
from setuptools.build_meta import prepare_metadata_for_build_wheel
prepare_metadata_for_build_wheel("metadata")
"""


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
    (folder / "metadata").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", WHEEL_METADATA], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("metadata/*.dist-info/METADATA")
    return HeaderParser().parsestr(file.read_text("utf-8"))


def test_the_version_has_one_source(metadata):
    assert metadata["Version"] == chatmill.__version__
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "mkdocs.yml", *ROOT.glob("docs/**/*.md")]
    stated = re.compile(rf"chatmill[ =@-]{{1,3}}v?{re.escape(chatmill.__version__)}\b")
    assert [page for page in pages if stated.search(page.read_text("utf-8"))] == []


def test_the_extra_all_is_every_other_extra_that_runs_on_any_machine(metadata):
    extras = PROJECT["optional-dependencies"]
    named = [re.fullmatch(r"chatmill\[([\w,]+)\]", requirement)[1].split(",") for requirement in extras["all"]]
    assert sorted(name for names in named for name in names) == sorted(extras.keys() - {"all", "flash"})
    assert set(metadata.get_all("Provides-Extra")) == set(extras)


def test_torch_is_needed_by_extras_alone():
    plain = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert plain == {"numpy", "msgspec", "tokenizers", "fastokens", "jinja2", "typer", "rich"}


CHANGELOG = """# Changelog

## [Unreleased]

- not yet

## [1.2.0] - 2026-01-31

### Added

- a thing

## [1.1.0] - 2026-01-01

- an older thing
"""


def release_notes(root, tag, version="1.2.0", changelog=CHANGELOG):
    package = root / "src" / "chatmill"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'import x\n\n__version__ = "{version}"\n')
    (root / "CHANGELOG.md").write_text(changelog)
    command = [sys.executable, ROOT / "scripts/release_notes.py", tag, "--root", root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_release_notes_are_the_section_of_the_version(tmp_path):
    assert release_notes(tmp_path, "v1.2.0") == (0, "### Added\n\n- a thing\n", "")


def test_a_tag_that_is_not_the_version_is_refused(tmp_path):
    expected = 'tag v1.1.0: chatmill.__version__ is "1.2.0"; expected the tag v1.2.0\n'
    assert release_notes(tmp_path, "v1.1.0") == (1, "", expected)


@pytest.mark.parametrize(
    "heading", ["## [1.3.0]", "## [1.3.0] - soon", "## [1.3.0] - 2026-02-01\n\n## [1.2.0] - 2026-01-31"]
)
def test_a_version_without_a_dated_section_is_refused(tmp_path, heading):
    expected = "CHANGELOG.md: no section for 1.3.0; expected ## [1.3.0] - YYYY-MM-DD followed by the changes\n"
    changelog = f"# Changelog\n\n{heading}\n\n- a thing\n"
    assert release_notes(tmp_path, "v1.3.0", "1.3.0", changelog) == (1, "", expected)


def made_targets(workflow) -> set[str]:
    targets = set()
    for job in workflow["jobs"].values():
        for step in job.get("steps", ()):
            words = step.get("run", "").split()
            if words[:1] == ["make"]:
                targets.update(job["strategy"]["matrix"]["target"] if words[1:] == ['"$TARGET"'] else words[1:])
    return targets


def test_the_workflows_run_what_ci_runs_with_targets_that_exist():
    targets = set().union(*map(made_targets, WORKFLOWS.values()))
    assert targets <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    local = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE))
    assert local <= targets


def test_tests_run_on_every_python_that_the_package_names_on_both_processors():
    matrix = WORKFLOWS["test.yml"]["jobs"]["test"]["strategy"]["matrix"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix == {"os": ["ubuntu-24.04", "ubuntu-24.04-arm"], "python": named}


def test_every_action_is_pinned_and_every_job_has_a_limit():
    for name, workflow in WORKFLOWS.items():
        text = (ROOT / ".github" / "workflows" / name).read_text("utf-8")
        uses = [line for line in re.findall(r"uses: (.+)", text) if not line.startswith("./")]
        assert [line for line in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
        assert workflow["permissions"] == {}
        assert [job for job in workflow["jobs"].values() if "uses" not in job and "timeout-minutes" not in job] == []


def test_the_container_copies_what_is_there_and_not_ignored():
    copied = [
        name
        for line in re.findall(r"^COPY (.+)$", (ROOT / "Containerfile").read_text("utf-8"), re.MULTILINE)
        for name in line.split()[:-1]
    ]
    admitted = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert copied == admitted
    assert [name for name in copied if not (ROOT / name).exists()] == []
