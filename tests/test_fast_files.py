from __future__ import annotations

from pathlib import Path

from slower_tests import CLUSTER, EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "tests" / "fast.txt").read_text("utf-8").splitlines()


def test_every_file_is_there_and_listed_once():
    assert sorted(set(FILES)) == FILES
    assert [name for name in FILES if not (ROOT / name).is_file()] == []


def test_no_file_belongs_to_a_target_of_slower_tests():
    slower = [name for name in FILES if CLUSTER.search(name) or any(f"{name}::".endswith(part) for part in EXAMPLES)]
    assert slower == []
