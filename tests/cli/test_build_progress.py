from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chatmill.cli.build_progress import BuildProgressDisplay
from chatmill.prepare import BuildProgress, InputSource, Job, LocalEngine, prepare_dataset
from chatmill.store.metadata import read_metadata

UNIT_BYTES = 400


def write_chat(path: Path, count: int) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"{path.stem} {n}"}, {"role": "assistant", "content": "yes " * 20}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    monkeypatch.chdir(tmp_path)
    for name, count in (("short", 8), ("long", 40), ("named", 16)):
        write_chat(Path(f"{name}.jsonl"), count)
    Path("recipe.toml").write_text(
        '[[source]]\ninputs = ["short.jsonl"]\nname = "brief"\n[[source]]\ninputs = ["long.jsonl"]\nname = "long"\n'
        '[[source]]\ninputs = ["named.jsonl"]\nname = "named"\n'
    )
    names = {"short.jsonl": "brief", "long.jsonl": "long", "named.jsonl": "named"}
    return Job(tuple(InputSource((file,), name=name) for file, name in names.items()))


def reports(job: Job, target: str, **options) -> list[BuildProgress]:
    seen: list[BuildProgress] = []
    prepare_dataset(job, target, unit_bytes=UNIT_BYTES, on_progress=seen.append, **options)
    return seen


@pytest.mark.parametrize("workers", [1, 2])
def test_each_source_has_its_own_counts(job, workers):
    seen = [each for each in reports(job, "x", engine=LocalEngine(workers)) if each.step == "render"]
    sizes = {"brief": "short.jsonl", "long": "long.jsonl", "named": "named.jsonl"}
    assert list(dict.fromkeys(each.source for each in seen)) == list(sizes)
    for name, file in sizes.items():
        own = [each for each in seen if each.source == name]
        size = Path(file).stat().st_size
        assert {each.total for each in own} == {size}
        assert [each.done for each in own] == sorted({each.done for each in own}) and own[-1].done == size
        assert len(own) > 1 and {each.resumed for each in own} == {0}
        assert own[-1].rows == len(Path(file).read_text().splitlines())
    total = sum(next(each.tokens for each in reversed(seen) if each.source == name) for name in sizes)
    assert total == read_metadata(Path("x")).ledger.total("rendered").tokens


def test_a_resumed_build_reports_the_units_it_reuses(job):
    """Units that the interrupted build has finished are counted separately, so that they do not affect the reported
    rate.
    """
    stopped = 0

    def stop(now: BuildProgress) -> None:
        nonlocal stopped
        if now.source == "long" and now.done > now.total // 2:
            stopped = now.done
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_dataset(job, "x", engine=LocalEngine(1), unit_bytes=UNIT_BYTES, on_progress=stop)
    seen = reports(job, "x", engine=LocalEngine(1), resume=True)
    last = {each.source: each for each in seen if each.step == "render"}
    sizes = {name: each.total for name, each in last.items()}
    assert {name: each.done for name, each in last.items()} == sizes
    assert {name: each.resumed for name, each in last.items()} == {
        "brief": sizes["brief"],
        "long": stopped,
        "named": 0,
    }


def test_one_source_has_no_name(job):
    seen = reports(Job((InputSource(("long.jsonl",)),)), "x", engine=LocalEngine(1))
    assert {each.source for each in seen} == {""}


def shown(capsys, *timed: tuple[float, BuildProgress]) -> list[str]:
    times = iter([0.0, *(at for at, _ in timed)])
    with BuildProgressDisplay(clock=lambda: next(times)) as display:
        for _, now in timed:
            display.show(now)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_log_file_gets_a_line_every_ten_seconds_and_at_the_end_of_a_source(capsys):
    def chat(done: int, resumed: int = 0) -> BuildProgress:
        return BuildProgress("render", done, 100, done, done * 1_000_000, "chat", resumed)

    tools = BuildProgress("render", 50, 50, 7, 5_000_000, "tools")
    assert shown(
        capsys,
        (3, chat(10)),
        (10, chat(20)),
        (19, chat(30)),
        (20, chat(40)),
        (25, chat(100)),
        (30, tools),
        (31, BuildProgress("write", 10, 10, 107, 10)),
    ) == [
        "chat: 20%, 20 rows, 20,000,000 tokens, 2.0 Mtok/s, 0:00:40 left",
        "chat: 40%, 40 rows, 40,000,000 tokens, 2.0 Mtok/s, 0:00:30 left",
        "chat: done, 100 rows, 100,000,000 tokens, 4.0 Mtok/s in 0:00:25",
        "tools: done, 7 rows, 5,000,000 tokens, 1.0 Mtok/s in 0:00:05",
    ]
    assert shown(capsys, (0.1, chat(40, 40)), (10, chat(60, 40))) == [
        "chat: 60%, 60 rows, 60,000,000 tokens, 2.0 Mtok/s, 0:00:20 left"
    ]
    assert shown(capsys, (11, chat(40, 40))) == ["chat: 40%, 40 rows, 40,000,000 tokens, 0.0 Mtok/s"]


def test_a_short_build_of_one_source_writes_no_lines(capsys):
    steps = [BuildProgress("render", 5, 5, 1, 1), BuildProgress("write", 5, 5, 1, 1)]
    assert shown(capsys, (1, steps[0]), (2, steps[1])) == []
    assert shown(capsys, (11, steps[0]), (12, steps[1])) == ["render: done, 1 row, 1 tokens, 0.0 Mtok/s in 0:00:11"]


def prepare(*flags: str, stderr: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from chatmill.cli.main import main; main()", "prepare", "recipe.toml", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)


def test_the_command_writes_a_line_for_each_source_to_a_log_file(job):
    import os
    import pty

    with prepare("-o", "x", "--json", stderr=subprocess.PIPE) as build:
        out, log = build.communicate(timeout=120)
    assert json.loads(out)["path"] == "x"
    lines = log.decode().splitlines()
    rows = {"brief": 8, "long": 40, "named": 16}
    assert [line.split(" rows")[0] for line in lines] == [f"{name}: done, {count}" for name, count in rows.items()]
    ours, theirs = pty.openpty()
    with prepare("-o", "y", "--json", stderr=theirs) as build:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:
            pass
        assert build.stdout is not None
        assert json.loads(build.stdout.read())["path"] == "y"
    os.close(ours)
    assert all(name.encode() in seen for name in (*rows, "write", "100%", "tokens"))
