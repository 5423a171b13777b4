from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from forked_commands import run_in_shell

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import demo_table  # noqa: E402

GOOD = {"questions": 413, "exact_rate": 0.98, "stop_rate": 1.0, "loss": 0.0061}
POOR = {"questions": 413, "exact_rate": 0.69, "stop_rate": 0.985, "loss": 0.5}
CARELESS = POOR | {"exact_rate": 0.4}


def test_every_step_of_the_demo_runs_and_a_model_that_learned_nothing_is_told_apart(tmp_path):
    for name in ("configs", "data", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "demo.sh"
    script.write_text((ROOT / "scripts" / "demo.sh").read_text().replace('"$(dirname "$0")/.."', '"$(dirname "$0")"'))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # After so few steps, the model generates answers of the maximum length.
    script.write_text(
        script.read_text().replace("demo/dataset --json >", "demo/dataset --json --limit 4 --max-tokens 4 >")
    )
    code, out, err = run_in_shell(
        "bash demo.sh --max_iters 10 --eval_iters 2", folder=tmp_path, environment=os.environ | {"PATH": path}
    )
    steps = [line for line in out.splitlines() if line.startswith("== ")]
    assert code == 1, err
    assert steps[-1] == "== What did the loss mask do? Same data, same steps"
    table = out.splitlines()[out.splitlines().index(steps[-1]) + 2 :]
    assert [line[:14].strip() for line in table[:4]] == ["", "with the mask", "without", ""]
    assert err.splitlines()[-4:] == [
        "questions is 4; expected at least 200",
        "exact_rate is 0; expected at least 0.7",
        "stop_rate is 0; expected at least 0.99",
        "difference is 0; expected at least 0.3",
    ]
    assert table[4] == "What to try next:"
    assert (tmp_path / "demo" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("score", "lines"),
    [
        (GOOD, []),
        (
            POOR | {"exact_rate": 0.65},
            [
                "exact_rate is 0.65; expected at least 0.7",
                "stop_rate is 0.985; expected at least 0.99",
                "difference is 0.25; expected at least 0.3",
            ],
        ),
        (GOOD | {"questions": 199}, ["questions is 199; expected at least 200"]),
    ],
)
def test_promises_that_do_not_hold_are_reported(score, lines, tmp_path, capsys, monkeypatch):
    for name, content in (("a.json", score), ("b.json", CARELESS)):
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["demo_table.py", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert demo_table.main() == (1 if lines else 0)
    said = capsys.readouterr()
    assert said.err.splitlines() == lines
    assert said.out.splitlines()[0].split() == ["questions", "exact", "stopped", "answer", "loss"]
    assert said.out.splitlines()[2].split() == ["without", "413", "40.0%", "98.5%", "0.5000"]
