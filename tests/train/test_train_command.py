from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from child_processes import end_children, start_child
from train_fixtures import SMALL, prepare

from chatmill.cli.guard import guarded
from chatmill.cli.main import main as chatmill
from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.train.command import OTHER_NAMES, errors_of_first_rank, main, parser
from chatmill.train.distributed import World
from chatmill.train.run_dir import read_metrics

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = ("msgspec", "typer", "rich", "tokenizers", "fastokens", "jinja2", "transformers", "peft")
ONLY_TORCH = f"""
import runpy, sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
sys.path = [place for place in sys.path if not place.rstrip("/").endswith("src")]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def place(sums_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/chat_sft").symlink_to(sums_data)
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    return tmp_path


class Started:
    def __init__(self, *args: str, **variables: str) -> None:
        self._output = tempfile.TemporaryDirectory()
        self._child = start_child(
            lambda: guarded(lambda: main(args)), variables=variables, output=Path(self._output.name)
        )

    def output(self, name: str) -> str:
        path = Path(self._output.name) / name
        return path.read_text() if path.exists() else ""

    def wait_for_error_line(self, text: str) -> None:
        while text not in self.output("err"):
            assert self._child.exitcode is None, self.output("err")
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        os.kill(self._child.pid, number)

    def ended(self) -> tuple[int, str, str]:
        (code,) = end_children([self._child])
        result = code, self.output("out"), self.output("err")
        self._output.cleanup()
        return result


def flags(*more: str, name: str = "mine", data: str = "data/chat_sft") -> list[str]:
    return ["--model_name", name, "--config_file", "small.json", "--dataset_dir", data, *more]


def test_train_py_needs_only_numpy_torch_and_safetensors(place):
    done = subprocess.run(
        [sys.executable, "-c", ONLY_TORCH, str(ROOT / "train.py"), *flags("--max_iters", "2", "--json")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] is True
    assert (place / "checkpoints/mine/step_00000002/model/model.safetensors").is_file()


@pytest.mark.parametrize("size", ["150M", "30M"])
def test_the_documented_command_trains(place, monkeypatch, capsys, size):
    # Smaller models keep the test of the documented commands short.
    (place / "configs").unlink()
    (place / "configs/sft1").mkdir(parents=True)
    shipped = json.loads((ROOT / f"configs/sft1/{size}.json").read_text())
    shipped |= {"n_layer": 1, "n_embd": 24, "n_head": 6, "n_ffn": 32, "block_size": 64}
    (place / "configs/sft1/150M.json").write_text(json.dumps(shipped))
    monkeypatch.setenv("POST_TRAINING", "")
    command = "--model_name my_sft_model --config_file configs/sft1/150M.json --dataset_dir data/chat_sft"
    main([*command.split(), "--max_iters", "2"])
    assert "2 steps, " in capsys.readouterr().out
    assert (place / "checkpoints/my_sft_model/step_00000002/model/config.json").is_file()
    assert len(list((place / "logs/audit").glob("audit_*.log"))) == 1
    mine = {"inherits": "configs/sft1/150M.json", "epoch_seed": 42, "batch_sampling_mode": "epoch"}
    (place / "configs/sft1/my_experiment.json").write_text(json.dumps(mine))
    command = "--model_name experiment_seed42 --config_file configs/sft1/my_experiment.json --dataset_dir data/chat_sft"
    main([*command.split(), "--device", "cpu"])
    steps = read_metrics(place / "checkpoints/experiment_seed42")
    assert steps[-1]["step"] == 48 // shipped["batch_size"]
    stored = json.loads((place / "checkpoints/experiment_seed42/config.json").read_text())
    assert (stored["epoch_seed"], stored["use_loss_mask"]) == (42, True)


def test_every_documented_flag_exists(place, capsys):
    given = {
        "learning_rate": "0.002",
        "eval_interval": "1",
        "eval_iters": "2",
        "batch_size": "2",
        "block_size": "40",
        "warmup_iters": "1",
        "weight_decay": "0.3",
        "grad_clip": "0.5",
        "max_iters": "2",
    }
    main(flags(*(part for name, value in given.items() for part in (f"--{name}", value))))
    stored = json.loads(Path("checkpoints/mine/config.json").read_text())
    assert {name: stored[name] for name in given} == {name: json.loads(value) for name, value in given.items()}
    assert len([line for line in read_metrics(Path("checkpoints/mine")) if "val_loss" in line]) == 2
    main(flags("--init_from_model", "checkpoints/mine", "--max_iters", "1", name="next"))
    assert json.loads(Path("checkpoints/next/config.json").read_text())["init_from_model"] == "checkpoints/mine"


def test_a_run_resumes_with_only_its_name(place, capsys):
    main(flags("--max_iters", "4", "--log-rows"))
    main(["--model_name", "mine", "--resume", "auto", "--max_iters", "6", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["step"], result["finished"], result["stopped_by"]) == (6, True, None)
    assert result["checkpoint"] == "checkpoints/mine/step_00000006"
    assert json.loads(Path("checkpoints/mine/config.json").read_text())["log_rows"] is True


def test_chatmill_train_is_the_same_command(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chatmill", "train", *flags("--max_iters", "1")])
    with pytest.raises(SystemExit) as code:
        chatmill()
    assert not code.value.code
    assert "see checkpoints/mine; checkpoint checkpoints/mine/step_00000001" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["chatmill", "train", "--help"])
    with pytest.raises(SystemExit):
        chatmill()
    told = capsys.readouterr().out
    assert "chatmill train --model_name mine --config_file configs/sft1/150M.json" in told
    assert "--gradient_accumulation_steps" in told


@pytest.mark.parametrize(
    "flags",
    [
        ["--max_iters", "3", "--log-rows", "--packing=bins"],
        ["--log_rows", "--max-iters", "3", "--grad-clip", "-1", "--compile", "false", "--json"],
        ["--bogus", "1", "--seed", "7"],
    ],
)
def test_both_commands_read_the_same_flags(monkeypatch, flags):
    read = []
    monkeypatch.setattr("chatmill.train.command.run_and_print", lambda *args, **more: read.append((args, more)))
    main(flags)
    monkeypatch.setattr(sys, "argv", ["chatmill", "train", *flags])
    with pytest.raises(SystemExit):
        chatmill()
    (ours, more), (theirs, others) = read
    assert (*ours, more["as_json"]) == (*theirs, others["as_json"])


def test_chatmill_train_reports_errors_in_one_line(place, monkeypatch, capsys):
    for args, code, said in (
        (["--model_name", "x"], 2, "chatmill: dataset_dir is missing; pass --dataset_dir, set "),
        (["--bogus", "1"], 2, "chatmill: unrecognized arguments: --bogus 1; see chatmill train --help\n"),
        (
            ["--max_steps", "1", "--max-seq-length=64", "--bogus", "--lora_r", "8"],
            2,
            "chatmill: unrecognized arguments: --max_steps 1 --max-seq-length=64 --bogus --lora_r 8; for max_steps, "
            "use --max_iters; for max_seq_length, use --block_size; for lora_r, use --lora '{\"r\": 16}'; see chatmill "
            "train --help\n",
        ),
        ([], 2, "chatmill: --model_name is missing; expected a name for the run\n"),
        (
            flags("--grad_clip", "-1", "--seed", "x"),
            2,
            'chatmill: the flags: grad_clip is -1; expected a number of at least 0; seed is "x"; '
            "expected an integer of at least 0\n",
        ),
        (flags(data="data/none"), 1, "chatmill: data/none: no such folder; expected a dataset"),
    ):
        monkeypatch.setattr(sys, "argv", ["chatmill", "train", *args])
        with pytest.raises(SystemExit) as ending:
            chatmill()
        assert ending.value.code == code
        err = capsys.readouterr().err
        assert err.startswith(said.rstrip("\n"))
        assert err.count("\n") == 1
    assert not Path("checkpoints").exists()


def test_suggested_flags_exist_and_the_flags_that_they_replace_do_not():
    known = {flag for action in parser("chatmill train")._actions for flag in action.option_strings}
    for theirs, ours in OTHER_NAMES.items():
        assert f"--{theirs}" not in known
        assert set(re.findall(r"--\w+", ours)) <= known and ours.startswith("--")


def test_flags_override_variables_which_override_the_file(place, monkeypatch, capsys):
    data = prepare(place, "blocks", "--format", "post-training", "--fit", "blocks", "--max-tokens", "49")
    monkeypatch.setenv("POST_TRAINING", "1")
    monkeypatch.setenv("WARMUP_PCT", "0.5")
    main(flags("--max_iters", "2", data=str(data)))
    stored = json.loads(Path("checkpoints/mine/config.json").read_text())
    assert (stored["post_training"], stored["warmup_pct"], stored["warmup_iters"]) == (True, 0.5, None)
    main(flags("--max_iters", "2", "--post_training", "false", "--warmup_iters", "1", name="other"))
    stored = json.loads(Path("checkpoints/other/config.json").read_text())
    assert (stored["post_training"], stored["warmup_pct"], stored["warmup_iters"]) == (False, None, 1)


def test_a_folder_name_may_look_like_a_number(place):
    (place / "123").symlink_to(place / "data/chat_sft")
    main(flags("--max_iters", "1", data="123"))
    with pytest.raises(UsageError, match=r"^7: no such folder"):
        main(flags("--init_from_model", "7", name="other"))


def test_shape_flags_are_refused_together_with_init_from_model(place):
    main(flags("--max_iters", "1"))
    # With init_from_model, model sizes in a config file are ignored, but flags that set model sizes are rejected.
    main(flags("--max_iters", "1", "--init_from_model", "checkpoints/mine", name="next"))
    for more in (
        flags("--init_from_model", "checkpoints/mine", name="other"),
        ["--model_name", "next", "--resume", "auto"],
    ):
        with pytest.raises(UsageError) as error:
            main([*more, "--n_layer", "7", "--max_positions", "5"])
        assert str(error.value) == (
            "--n_layer, --max_positions: cannot change the shape of checkpoints/mine (init_from_model); "
            "remove these flags"
        )


def test_sigterm_saves_a_checkpoint_and_exits_with_code_0(place):
    started = Started(*flags("--max_iters", "100000", "--log_interval", "1"))
    started.wait_for_error_line("step 2/")
    started.signal(signal.SIGTERM)
    code, out, _ = started.ended()
    assert code == 0
    assert out.startswith("stopped by SIGTERM at step ")
    assert "continue with --resume auto" in out
    step = int(out.split()[5])
    assert (place / f"checkpoints/mine/step_{step:08d}/checkpoint.json").is_file()


def test_a_run_without_checkpoints_says_so_when_stopped_and_when_restarted(place):
    unsaved = flags("--max_iters", "100000", "--log_interval", "1", "--save_interval", "0")
    started = Started(*unsaved)
    started.wait_for_error_line("step 2/")
    started.signal(signal.SIGTERM)
    code, out, _ = started.ended()
    first, *_, last = out.splitlines()
    assert (code, last) == (0, "see checkpoints/mine")
    assert first.startswith("stopped by SIGTERM at step ")
    assert first.endswith(" of 100,000; this step was not saved because save_interval is 0")
    code, _, err = Started(*flags("--max_iters", "1", "--resume", "auto")).ended()
    assert code == 0
    assert err.startswith(
        "checkpoints/mine has no checkpoint: the run starts again from the beginning, and its previous metrics are "
        "removed\n"
    )


def world(count: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def test_ranks_train_one_model_and_only_rank_0_prints(place):
    both = [Started(*flags("--max_iters", "3", "--parallel", "fsdp"), **variables) for variables in world(2)]
    (code, out, err), other = [each.ended() for each in both]
    assert (code, other) == (0, (0, "", ""))
    assert "3 steps, " in out
    assert "step 3/3" in err
    assert len(read_metrics(place / "checkpoints/mine")) == 3


def test_an_error_on_all_ranks_is_printed_once(place):
    both = [Started(*flags("--block_size", "1000"), **variables) for variables in world(2)]
    (code, out, err), other = [each.ended() for each in both]
    assert (code, out, other) == (1, "", (1, "", ""))
    assert err == "chatmill: block_size is 1000, but the model has 64 positions; lower block_size\n"


def test_blocks_are_post_trained_with_the_documented_environment_variable(place, monkeypatch, capsys):
    data = prepare(place, "blocks", "--format", "post-training", "--fit", "blocks", "--max-tokens", "32")
    monkeypatch.setenv("POST_TRAINING", "1")
    main(flags("--max_iters", "1000", "--block_size", "31", data=str(data)))
    stored = json.loads(Path("checkpoints/mine/config.json").read_text())
    assert stored["post_training"] is True
    assert "steps, " in capsys.readouterr().out
    assert len(read_metrics(Path("checkpoints/mine"))) == -(-22 // SMALL["batch_size"])


def test_post_training_after_plain_training_uses_the_mask_and_all_blocks(place, monkeypatch, capsys):
    data = prepare(place, "blocks", "--format", "post-training", "--fit", "blocks", "--max-tokens", "32")
    main(flags("--max_iters", "null", "--use_loss_mask", "false", "--block_size", "31", data=str(data)))
    said = "2 of 22 episodes do not fill a batch at the end of the epoch and are dropped; add --epoch_drop_last false"
    assert said in capsys.readouterr().err
    monkeypatch.setenv("POST_TRAINING", "1")
    main(["--model_name", "mine", "--resume", "auto"])
    stored = json.loads(Path("checkpoints/mine/config.json").read_text())
    assert (stored["use_loss_mask"], stored["epoch_drop_last"]) == (True, False)
    assert "fill a batch" not in capsys.readouterr().err
    assert len(read_metrics(Path("checkpoints/mine"))) == 22 // 4 + -(-22 // 4)


@pytest.mark.parametrize("command", ["train.py", "chatmill train"])
def test_post_training_refuses_datasets_without_blocks_of_its_size(place, monkeypatch, capsys, command):
    monkeypatch.setenv("POST_TRAINING", "1")
    line = "data/chat_sft: was made with --fit exchanges, but post_training requires "
    line += "blocks of block_size + 1 = 49 tokens"
    make = "build them with chatmill prepare … --format post-training --fit blocks --max-tokens 49"
    if command == "train.py":
        with pytest.raises(DataError) as refused:
            main(flags("--audit_dir", "audit"))
        assert str(refused.value) == f"{line}; {make}"
    else:
        monkeypatch.setattr("sys.argv", ["chatmill", "train", *flags("--audit_dir", "audit")])
        with pytest.raises(SystemExit) as ending:
            chatmill()
        assert (ending.value.code, capsys.readouterr().err) == (1, f"chatmill: {line}; {make}\n")
    assert not Path("checkpoints").exists()
    assert not Path("audit").exists()


@pytest.mark.parametrize(
    ("size", "rank", "line"), [(2, 1, "rank 1: damaged"), (2, 0, "rank 0: damaged"), (1, 0, "damaged")]
)
def test_an_error_on_one_rank_is_reported_by_that_rank(monkeypatch, size, rank, line):
    monkeypatch.setenv("RANK", str(rank))

    def read_rows() -> None:
        raise DataError("damaged")

    with pytest.raises(ChatmillError) as error, errors_of_first_rank():
        World(rank, size, torch.device("cpu")).alone(read_rows)
    assert str(error.value) == line
