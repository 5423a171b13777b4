from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
DETECT = ROOT / "examples" / "detect"
sys.path.insert(0, str(DETECT))

from study import SETTINGS, all_jobs, interval, read_results, table_lines  # noqa: E402


@pytest.mark.parametrize("seeds", ["seeds-0-2", "seeds-3-7"])
def test_the_documentation_shows_the_table_of_the_stored_results(seeds):
    lines = list(table_lines(read_results(DETECT / "results" / f"{seeds}.jsonl"), "f1", None))
    assert len(lines) > 10
    assert "\n".join(lines) in (ROOT / "docs" / "explanation" / "rollout.md").read_text("utf-8")


def test_the_interval_equals_that_of_students_t_test():
    for values in ([0.1, 0.4], [0.3, -0.2, 0.5], [0.5, 0.6, 0.7, 0.55, 0.61], list(range(8))):
        wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert interval(values) == pytest.approx((wanted.low, wanted.high), abs=1e-3)


def test_each_setting_changes_one_factor_and_shares_its_start_with_its_control():
    assert len(SETTINGS) <= 24
    jobs = list(all_jobs(SETTINGS, [0, 1]))
    assert len(jobs) == len(set(jobs))
    for name, setting, seed in jobs:
        if name in SETTINGS:
            before = jobs[: jobs.index((name, setting, seed))]
            assert [job for job in before if job[0] == "stage 1" and job[2] == seed]


@pytest.mark.cluster
def test_the_study_runs_and_resumes_where_it_was_stopped(tmp_path):
    tiny = ["scenes=60", "first=4", "saves=2", "then=2", "every=2", "width=32", "layers=1", "objects=3"]
    command = [sys.executable, str(DETECT / "study.py"), "run", "--out", str(tmp_path / "study"), "--seeds", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*names: str) -> list[dict]:
        subprocess.run(
            [*command, "--only", *names, "--set", *tiny], check=True, timeout=400, capture_output=True, env=environment
        )
        return read_results(tmp_path / "study" / "results.jsonl")

    first = run("fused, canonical")
    assert [line["name"] for line in first] == ["stage 1", "control", "fused, canonical"]
    agreed = first[0]["borders"]
    assert {border: of["same"] for border, of in agreed.items()} == {
        "shorter": 0.0,
        "masked": 0.0,
        "joined": 1.0,
        "canonical": 1.0,
    }
    both = run("fused, canonical", "fused, masked")
    assert both[:3] == first
    assert [line["name"] for line in both[3:]] == ["fused, masked"]
    assert len(list(table_lines(both, "recall", None))) == 4
