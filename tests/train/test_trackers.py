from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tracker_readers as read
from train_fixtures import config, trained

from chatmill import __version__
from chatmill.cli.report_page import report_page
from chatmill.cli.train import _decoder
from chatmill.config import from_flags
from chatmill.errors import UsageError
from chatmill.store.read import open_dataset
from chatmill.train import SampleAnswer, TrainConfig, read_metrics, train_model
from chatmill.train.command import main
from chatmill.train.run_dir import RunDir
from chatmill.train.trackers import pages, reporter
from chatmill.train.trackers.interface import flat, numbers
from chatmill.train.trackers.mlflow_tracker import valid_name
from chatmill.train.trackers.pages import report_pages
from chatmill.train.trackers.wandb_tracker import WandbTracker

ALL = ["tensorboard", "wandb", "mlflow"]
SECRET = "value-of-an-environment-variable"
SETTINGS = {"eval_interval": 2, "save_interval": 2, "eval_samples": 1, "keep_checkpoints": 9, "report_to": ALL}

# The clients themselves cause warnings.
pytestmark = pytest.mark.filterwarnings("default")


def run(data, out, *, resume=None, trackers=(), quiet=True, watch=None, **changes):
    return train_model(
        config(**changes),
        model_name="mine",
        dataset_dir=data,
        out_dir=out,
        resume=resume,
        open_text=_decoder,
        report_page=report_page,
        trackers=trackers,
        watch=watch,
        quiet=quiet,
    )


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in list(os.environ):
            if name.startswith(("WANDB_", "MLFLOW_")):
                patch.delenv(name)
        patch.setenv("WANDB_MODE", "offline")
        for name in ("DATA", "CACHE", "CONFIG"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / name))
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("SOME_SECRET", SECRET)
        yield folder
        import wandb
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        wandb.teardown()
        for engine in SqlAlchemyStore._engine_map.values():
            engine.dispose()


@pytest.fixture(scope="module")
def tracked(clients, sums_data):
    result = run(sums_data, clients / "out", max_iters=4, **SETTINGS)
    first = read_metrics(result.folder)
    before = {"numbers": first, "plot": (result.folder / "loss.svg").read_bytes()}
    again = run(sums_data, clients / "out", max_iters=5, resume=str(result.folder / "step_00000002"), **SETTINGS)
    assert again.step == 5
    return SimpleNamespace(folder=result.folder, data=sums_data, before=before, lines=read_metrics(result.folder))


def resumed_lines(tracked):
    return [line for line in tracked.lines if line["step"] > 2]


def expected_config(tracked):
    stored = json.loads((tracked.folder / "config.json").read_text())
    metadata = json.loads((tracked.data / "dataset_metadata.json").read_text())
    assert stored["dataset_dir"] == str(tracked.data)
    return {**stored, "dataset_sha256": metadata["sha256"], "world_size": 1, "chatmill_version": __version__}


def test_tensorboard_reads_every_metric_once(tracked):
    expected = [(step, name, float(np.float32(value))) for step, name, value in read.numbers_of(tracked.lines)]
    assert sorted(read.tensorboard_numbers(tracked.folder)) == sorted(expected)
    texts = read.tensorboard_texts(tracked.folder, "config")
    assert [step for step, _ in texts] == [0, 2]
    assert json.loads(texts[-1][1]) == expected_config(tracked)
    samples = read.tensorboard_texts(tracked.folder, "samples/1")
    # TensorBoard does not purge the texts of repeated steps, so step 4 occurs twice, with the same answers.
    assert [step for step, _ in samples] == [2, 4, 4, 5] and samples[1] == samples[2]
    assert all(text.startswith("prompt\n") and "\n\nexpected\n" in text for _, text in samples)


def test_wandb_reads_every_line_of_both_parts_of_the_run(tracked):
    first, second = read.wandb_folders(tracked.folder)
    assert sorted(read.wandb_numbers(first)) == sorted(read.numbers_of(tracked.before["numbers"]))
    assert sorted(read.wandb_numbers(second)) == sorted(read.numbers_of(resumed_lines(tracked)))
    configs = read.wandb_config(first), read.wandb_config(second)
    ids = json.loads((tracked.folder / "trackers.json").read_text())
    named = {"run_id": ids["wandb"], "project": "chatmill", "name": "mine", "_wandb": {}}
    assert configs[1] == {**expected_config(tracked), **named}
    assert configs[0] == {**configs[1], "max_iters": 4}
    table = read.wandb_tables(first)[0]
    assert table["columns"] == ["prompt", "answer", "expected"] and len(table["data"]) == 1
    files = read.wandb_artifacts(second)
    names = ("config.json", "metrics.jsonl", "loss.svg", "reports/report.html")
    assert {name: files[Path(name).name] for name in names} == {
        name: (tracked.folder / name).read_bytes() for name in names
    }
    # The artifacts from before the run resumed can still be uploaded, although the run has replaced the files.
    assert read.wandb_artifacts(first)["loss.svg"] == tracked.before["plot"]
    assert [read.wandb_exit(folder) for folder in (first, second)] == [(False, 0), (False, 0)]


def test_mlflow_reads_every_line_of_one_run(tracked, tmp_path):
    [logged] = read.mlflow_runs()
    both = read.numbers_of([*tracked.before["numbers"], *resumed_lines(tracked)])
    assert sorted(read.mlflow_numbers(logged)) == sorted(both)
    stored = flat(expected_config(tracked)).items()
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in stored}
    assert logged.data.params == {**values, "max_iters": "4"}
    changed = {"max_iters": "5"}
    assert logged.data.tags == {"mlflow.runName": "mine", "resumed_at_step_2": json.dumps(changed)}
    assert (logged.info.run_name, logged.info.status, logged.info.user_id) == ("mine", "FINISHED", "unknown")
    files = read.mlflow_artifacts(logged, tmp_path)
    samples = {f"samples/step_{step:08d}.json" for step in (2, 4, 5)}
    assert {"loss.svg", "metrics.jsonl", "config.json", "report.html", *samples} == files.keys()
    assert files["report.html"] == report_page(tracked.data).encode()
    assert files["metrics.jsonl"] == (tracked.folder / "metrics.jsonl").read_bytes()
    [sample] = json.loads(files["samples/step_00000004.json"])
    table = read.wandb_tables(read.wandb_folders(tracked.folder)[1])[0]
    assert SampleAnswer(**sample) == SampleAnswer(*table["data"][0]) and "user" in sample["prompt"]


def test_nothing_of_the_environment_is_logged(tracked, clients):
    paths = [
        clients / "mlflow.db",
        *(path for folder in ("wandb", "tensorboard") for path in (tracked.folder / folder).rglob("*")),
    ]
    held = b"".join(path.read_bytes() for path in paths if path.is_file())
    assert SETTINGS["report_to"][0].encode() in held
    for unwanted in (SECRET, str(Path(sys.argv[0]).resolve()), str(Path(__file__).parent), str(Path.home() / ".")):
        assert unwanted.encode() not in held


RECORDS = {"header", "run", "telemetry", "metric", "summary", "history", "artifact", "files", "exit"}


def test_wandb_logs_what_it_was_given_and_nothing_of_the_machine(tracked):
    for folder in read.wandb_folders(tracked.folder):
        records = list(read.wandb_records(folder))
        assert {record.WhichOneof("record_type") for record in records} == RECORDS
        [started] = [record.run for record in records if record.HasField("run")]
        assert (started.host, started.HasField("git")) == ("", False)
        assert {path.parent.name for path in (folder / "files").rglob("*") if path.is_file()} == {"table"}


def test_trackers_do_not_change_process_hooks(tracked):
    assert "wandb" not in f"{sys.exit} {sys.excepthook} {signal.getsignal(signal.SIGINT)}"


class Recorder:
    def __init__(self, name="own", **faults):
        self.name, self.calls, self.faults = name, [], faults

    def start(self, run):
        self.started = run
        self._record("start", run.step, run.id)
        return "the id"

    def log_metrics(self, step, metrics):
        self._record("metrics", step, dict(metrics))

    def log_samples(self, step, samples):
        self._record("samples", step, list(samples))

    def log_artifact(self, path):
        self._record("artifact", path.name)

    def finish(self, status):
        self._record("finish", status)

    def _record(self, what, *values):
        if (fault := self.faults.get(what)) is not None:
            fault()
        self.calls.append((what, *values))


def test_only_numbers_are_metrics():
    line = {"step": 2, "loss": None, "lr": 0.5, "rows": [1], "rollouts": {"valid": 3, "terms": {"a": 1.5}}, "at": "x"}
    assert numbers(line) == {"lr": 0.5, "rollouts/valid": 3, "rollouts/terms/a": 1.5}


def test_a_custom_tracker_gets_all_calls_in_order(sums_data, tmp_path):
    changes = {**SETTINGS, "report_to": [], "max_iters": 3}
    folder = run(sums_data, tmp_path, trackers=[own := Recorder()], **changes).folder
    lines = [("metrics", line["step"]) for line in read_metrics(folder)]
    # The samples of an evaluation are logged before its numbers.
    expected = [*lines[:2], ("samples", 2), *lines[2:4], ("samples", 3), *lines[4:]]
    files = [("artifact", name) for name in ("report.html", "config.json", "metrics.jsonl", "loss.svg")]
    assert [call[:2] for call in own.calls] == [("start", 0), *expected, *files, ("finish", "finished")]
    run(sums_data, tmp_path, trackers=[again := Recorder()], resume="auto", **{**changes, "max_iters": 4})
    assert again.calls[0] == ("start", 3, "the id") and again.calls[-1] == ("finish", "finished")
    assert again.started.config["max_iters"] == 4 and again.started.folder == folder


def broken(*_):
    raise OSError(28, "No space left on http://me:password@host/device\n")


def test_failing_trackers_are_reported_once_and_the_run_continues(sums_data, tmp_path, capsys):
    failures = {"metrics": 6, "samples": 3, "artifact": 4, "finish": 1}
    own = [Recorder(name, **{name: broken}) for name in failures]
    assert run(sums_data, tmp_path, trackers=own, quiet=False, max_iters=3, eval_interval=1, eval_samples=1).step == 3
    lines = capsys.readouterr().err.splitlines()
    for tracker, count in zip(own, failures.values(), strict=True):
        shown = [line for line in lines if line.startswith(f"{tracker.name}: ")]
        reason = f"{tracker.name}: [Errno 28] No space left on http://…@host/device; the run continues"
        assert shown == [reason, f"{tracker.name}: {count} of 14 reports failed"][: min(count, 2)]
        made = {call[0] for call in tracker.calls}
        assert made == {"start", *failures} - {tracker.name}


def test_a_tracker_that_cannot_start_is_reported_and_the_run_continues(sums_data, tmp_path, capsys):
    assert run(sums_data, tmp_path, trackers=[Recorder(start=broken)], quiet=False, max_iters=2).step == 2
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("own: ")]
    assert len(shown) == 2 and shown[0].endswith("the run continues without it")
    # The run sends 7 reports: two steps, four files and the end of the run.
    assert shown[1] == "own: 7 of 7 reports failed"
    assert not (tmp_path / "mine" / "trackers.json").exists()


def test_a_tracker_that_hangs_delays_neither_the_run_nor_its_end(sums_data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reporter, "FINISH_SECONDS", dict.fromkeys(reporter.FINISH_SECONDS, 0.01))
    monkeypatch.setattr(reporter, "WAITING", 3)
    released = threading.Event()
    result = run(sums_data, tmp_path, trackers=[Recorder(metrics=released.wait)], quiet=False, max_iters=8)
    released.set()
    assert result.step == 8
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("own: ")]
    assert shown[0] == "own: is slower than the run: 3 reports are queued, and further reports are dropped"
    # The run sends 13 reports: eight steps, four files and the end of the run.
    assert shown[1] == "own: has not finished in time; up to 13 of 13 reports are lost"


def test_a_start_that_hangs_is_not_waited_for(sums_data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reporter, "START_SECONDS", 0.01)
    released = threading.Event()
    own = Recorder(start=released.wait)
    watch = lambda record: released.set()  # noqa: E731
    assert run(sums_data, tmp_path, trackers=[own], quiet=False, watch=watch, max_iters=3).step == 3
    assert "own: has not started after 0.01 seconds; the run continues\n" in capsys.readouterr().err
    assert [call[:2] for call in own.calls[:4]] == [("start", 0), ("metrics", 1), ("metrics", 2), ("metrics", 3)]
    assert json.loads((tmp_path / "mine" / "trackers.json").read_text()) == {"own": "the id"}


def test_trackers_distinguish_a_signal_from_an_error(sums_data, tmp_path):
    stopped, failed = Recorder(), Recorder()
    watch = lambda record: record.step == 2 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    assert run(sums_data, tmp_path, trackers=[stopped], watch=watch).stopped_by == "SIGTERM"
    with pytest.raises(OSError, match="No space"):
        run(sums_data, tmp_path, trackers=[failed], resume="auto", watch=broken)
    assert stopped.calls[-1] == ("finish", "stopped") and failed.calls[-1] == ("finish", "failed")
    assert ("artifact", "report.html") not in stopped.calls


def refuse():
    raise UsageError("own: is refused")


def test_a_refused_start_ends_the_other_trackers_and_leaves_no_files(sums_data, tmp_path):
    own, other = Recorder(), Recorder("other", start=refuse)
    with pytest.raises(UsageError, match="own: is refused"):
        run(sums_data, tmp_path / "out", trackers=[own, other])
    assert own.calls == [("start", 0, None), ("finish", "failed")]
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="two trackers are named own"):
        run(sums_data, tmp_path / "out", trackers=[Recorder(), Recorder()])


def test_damaged_ids_are_a_one_line_error(sums_data, tmp_path):
    folder = run(sums_data, tmp_path, trackers=[Recorder()], max_iters=2).folder
    (folder / "trackers.json").write_text('{"own": 3}')
    with pytest.raises(UsageError, match=r"trackers\.json: does not contain an id for each tracker"):
        run(sums_data, tmp_path, trackers=[Recorder()], resume="auto", max_iters=4)


def test_pages_that_cannot_be_written_are_reported_without_an_error(sums_data, monkeypatch):
    source = SimpleNamespace(path=sums_data, dataset=open_dataset(sums_data))
    written, notes = {}, []

    def pages_of(page, count=1):
        written.clear(), notes.clear()
        report_pages([source] * count, page, write=written.__setitem__, note=notes.append)
        prefix = f"{sums_data}: the report is not sent to the trackers"
        return sorted(written), [note.removeprefix(prefix) for note in notes]

    assert pages_of(report_page) == (["report.html"], [])
    assert pages_of(str, count=2) == (["report-1.html", "report-2.html"], [])
    assert pages_of(None) == (
        [],
        ["the dataset report is not sent to the trackers; use `chatmill train` to send it"],
    )
    assert pages_of(broken) == ([], [" ([Errno 28] No space left on http://me:password@host/device\\n)"])
    monkeypatch.setattr(pages, "MOST_TOKENS", 10)
    tokens = sum(source.dataset[split].num_tokens for split in ("train", "val"))
    assert pages_of(report_page) == (
        [],
        [f", because the dataset has {tokens:,} tokens (limit: 10); run `chatmill report` to write the report"],
    )


def test_only_the_first_rank_reports(tmp_path):
    own = Recorder()
    world = SimpleNamespace(is_first=False, rank=1, size=2, together=lambda work: work())
    run_dir = RunDir(tmp_path, config().to_json(), world, step=0, total=2, trackers=[own])
    run_dir.log({"step": 1, "loss": 1.0})
    run_dir.close()
    assert own.calls == [] and not run_dir.is_tracked


# Settings.


@pytest.mark.parametrize("name", ALL)
def test_a_client_that_is_not_installed_is_a_one_line_error(sums_data, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    expected = rf"report_to contains {name}, which is not installed; pip install 'chatmill\[{name}\]'"
    with pytest.raises(UsageError, match=expected):
        trained(sums_data, tmp_path / "out", report_to=[name])
    assert not (tmp_path / "out").exists()


def test_a_folder_named_wandb_is_not_treated_as_the_package(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    code = "import sys; from chatmill.train.trackers.reporter import named_trackers; named_trackers(['elsewhere'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "report_to contains elsewhere, which is not installed" in done.stderr


@pytest.mark.parametrize("value", ["wandbb", ["wandb", "wandb"], [["wandb"]], 3, None, {"wandb": 1}])
def test_report_to_accepts_only_known_trackers(value):
    with pytest.raises(
        UsageError, match="expected one of tensorboard, wandb, mlflow, or a list of these names without duplicates"
    ):
        config(report_to=value)


def test_report_to_accepts_a_single_tracker_without_a_list():
    assert from_flags(TrainConfig, {"report_to": "wandb"}) == {"report_to": "wandb"}
    assert from_flags(TrainConfig, {"report_to": '["wandb", "mlflow"]'}) == {"report_to": ["wandb", "mlflow"]}
    assert [each.name for each in reporter.named_trackers("wandb")] == ["wandb"]


def test_the_old_key_tensorboard_names_its_replacement(tmp_path, sums_data):
    with pytest.raises(
        UsageError, match=r'the key tensorboard was replaced by report_to; use "report_to": \["tensorboard"\]'
    ):
        config(tensorboard=True)
    with pytest.raises(UsageError, match="unrecognized argument: --tensorboard; use --report_to tensorboard"):
        main(["--model_name", "x", "--tensorboard", "--out_dir", str(tmp_path)])


@pytest.mark.parametrize("before", [True, False])
def test_a_run_of_an_earlier_version_resumes(sums_data, tmp_path, capsys, before):
    folder = trained(sums_data, tmp_path, name="mine", max_iters=2).folder
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    del stored["report_to"]
    path.write_text(json.dumps({**stored, "tensorboard": before}))
    main(["--model_name", "mine", "--out_dir", str(tmp_path), "--resume", "auto", "--max_iters", "3", "--json"])
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert json.loads(path.read_text())["report_to"] == (["tensorboard"] if before else [])
    assert (folder / "tensorboard").is_dir() == before


NAMES = ["val_loss/chat", "val_loss/a+b", "val_loss/a=b", "/x", "x/", "a//b", "../x", ".", "a" * 300, "é", "a\nb", ""]


def test_names_converted_for_mlflow_are_valid_and_distinct(clients):
    from mlflow.utils.validation import _validate_metric_name

    valid = [valid_name(name) for name in NAMES]
    for name in valid:
        _validate_metric_name(name)
    assert len(set(valid)) == len(NAMES) and valid[0] == NAMES[0]


def test_errors_that_mlflow_logs_itself_are_not_shown(tracked, capfd):
    """mlflow logs a traceback for every database call that fails, and also raises the error."""
    logging.getLogger("mlflow.store.db.utils").error("a traceback for every failed call")
    assert capfd.readouterr().err == ""


def test_wandb_without_credentials_and_mlflow_with_a_wrong_address_refuse_the_run(clients, sums_data, monkeypatch):
    import wandb

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(UsageError, match=r"mlflow: .*nowhere.*; check MLFLOW_TRACKING_URI"):
        trained(sums_data, clients / "refused", report_to=["mlflow"])
    # The W&B client reads its settings only when it starts, so stop it before the environment changes.
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "on")
    with pytest.raises(UsageError, match=r"^wandb: .* mode Input should be 'online'"):
        trained(sums_data, clients / "refused", report_to=["wandb"])
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(
        UsageError, match="report_to contains wandb, but W&B credentials are missing; run `wandb login`"
    ):
        trained(sums_data, clients / "refused", report_to=["wandb"])
    monkeypatch.setattr(wandb, "__version__", "0.29.1")
    with pytest.raises(UsageError, match=r"wandb 0\.29\.1 is too old; pip install 'chatmill\[wandb\]'"):
        WandbTracker().start(SimpleNamespace())
    assert not (clients / "refused").exists()
    wandb.teardown()


def test_tracking_does_not_change_the_run(tracked, sums_data, tmp_path):
    changes = {**SETTINGS, "report_to": (), "max_iters": 4}
    plain = read_metrics(run(sums_data, tmp_path, **changes).folder)
    for name in ("loss", "grad_norm", "val_loss", "val_exact_rate"):
        assert [line.get(name) for line in plain] == [line.get(name) for line in tracked.before["numbers"]]
