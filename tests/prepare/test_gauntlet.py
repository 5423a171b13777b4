"""The kill gauntlet in short: `scripts/gauntlet.py` does it at length."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_builds_killed_at_random_moments_lose_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import gauntlet

    counts = gauntlet.run(kills=8, seconds=0.5, seed=3, folder=tmp_path)
    assert counts["target absent"] + counts["target old"] + counts["target new"] == 8
    assert counts["target lost"] == 0
    assert counts["killed while it ran"] > 0
    assert counts["resumed"] == counts["resumed, the same hash"] == 1
    assert "shards takes" in capsys.readouterr().out
