from __future__ import annotations

import errno
import math
import os
import re
import resource
import signal
import time

import pytest
import torch
from child_processes import end_children, start_child
from train_fixtures import config, curve, ranks, trained

from chatmill.audit import verify_log
from chatmill.errors import ChatmillError
from chatmill.load.loader import EpisodeLoader
from chatmill.load.source import conversation
from chatmill.store import files
from chatmill.train.checkpoint_files import list_checkpoints
from chatmill.train.gpt import GPT
from chatmill.train.loop import train_model
from chatmill.train.out_of_memory import OutOfMemoryError
from chatmill.train.step import NotFiniteError, Stepper


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(sums_data, tmp_path, number):
    usual = signal.getsignal(number)

    def stop(step):
        if step.step == 3:
            os.kill(os.getpid(), number)

    result = train_model(
        config(max_iters=40),
        model_name="run",
        dataset_dir=sums_data,
        out_dir=tmp_path,
        watch=stop,
        quiet=True,
    )
    assert result.stopped_by == number.name
    assert 3 < result.step < 10
    assert result.checkpoint == tmp_path / "run" / f"step_{result.step:08d}"
    assert len(curve(result.folder)) == result.step
    assert signal.getsignal(number) == usual
    again = trained(sums_data, tmp_path, resume="auto", max_iters=40)
    whole = trained(sums_data, tmp_path, name="whole", max_iters=40)
    assert (again.step, again.stopped_by) == (40, None)
    assert curve(again.folder) == curve(whole.folder)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(sums_data, tmp_path):
    def run(rank: int) -> list:
        def stop(step):
            if step.step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        result = train_model(
            config(max_iters=40), model_name="run", dataset_dir=sums_data, out_dir=tmp_path, watch=stop, quiet=True
        )
        return [result.step, result.stopped_by]

    (one, why), (other, _) = ranks(2, run)
    assert one == other < 10
    assert why == "a signal that another rank received"
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step_{one:08d}"


def test_a_second_signal_ends_the_run_immediately(sums_data, tmp_path):
    def stop(step):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    def both(step):
        stop(step)
        stop(step)

    with pytest.raises(KeyboardInterrupt):
        train_model(config(), model_name="run", dataset_dir=sums_data, out_dir=tmp_path, watch=both, quiet=True)


def broken(settings, vocab_size, value):
    model = GPT(settings.sizes(vocab_size))
    with torch.no_grad():
        model.norm.weight[3] = value
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_loss_stops_the_run_and_names_the_episodes(sums_data, tmp_path, value):
    settings = config(save_interval=1)
    loader = EpisodeLoader(sums_data, settings)
    episodes = sorted(next(iter(loader.plan("train").one_epoch())).episodes.tolist())
    model = broken(settings, loader.vocab_size, value)
    with pytest.raises(NotFiniteError) as error:
        train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path, model=model, quiet=True)
    places = [conversation(loader.sources, "train", episode, -1).place for episode in episodes]
    names = ", ".join(f"{place} (episode {each}, loss nan)" for place, each in zip(places, episodes[:3], strict=False))
    assert str(error.value) == (
        f"step 1: the loss is nan; all 4 conversations have a non-finite loss: {names} and 1 more; lower "
        "learning_rate, or inspect the data, and start the run again, because no checkpoint was written"
    )
    assert list_checkpoints(tmp_path / "run") == []


def test_a_nan_loss_in_a_later_step_names_the_step_and_the_last_good_checkpoint(sums_data, tmp_path):
    with pytest.raises(NotFiniteError, match=r"^step \d+: .* resume from .*step_0000000\d$") as error:
        trained(sums_data, tmp_path, learning_rate=1e30, warmup_iters=0, grad_clip=0, weight_decay=0, save_interval=1)
    step = int(str(error.value).split()[1].rstrip(":"))
    assert list_checkpoints(tmp_path / "run")[-1].name == f"step_{step - 1:08d}"


def test_a_gpu_out_of_memory_error_suggests_what_to_lower(sums_data, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")

    monkeypatch.setattr(Stepper, "step", full)
    with pytest.raises(OutOfMemoryError) as error:
        trained(sums_data, tmp_path, gradient_accumulation_steps=2)
    assert str(error.value) == (
        "the GPU is out of memory with 2 rows of 48 tokens at a time; "
        "raise gradient_accumulation_steps from 2, or set activation_checkpointing, "
        "or set optimizer to adamw8bit (6 bytes per parameter instead of 16)"
    )


@pytest.mark.parametrize("changes", [{}, {"block_size": 65}])
def test_two_ranks_that_finish_no_step_leave_neither_a_folder_nor_an_audit_log(sums_data, tmp_path, changes):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def refused(rank: int) -> bool:
        Stepper.step = full
        try:
            trained(sums_data, tmp_path / "out", audit_dir=str(tmp_path / "logs"), log_rows=True, **changes)
        except ChatmillError:
            return True
        return False

    assert ranks(2, refused) == [True, True]
    assert list(tmp_path.iterdir()) == []


HOST_IS_FULL = (
    "the host is out of memory (it has N GiB) with 4 rows of 48 tokens at a time; "
    "lower batch_size, block_size or max_positions, or use a smaller model\n"
)


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_embd": 1_000_000_000, "n_head": 1000},
        {"n_embd": 2**31, "n_head": 2**10, "vocab_size": 2**31},
    ],
)
def test_a_model_that_does_not_fit_in_host_memory_is_a_one_line_error(sums_data, tmp_path, sizes):
    def train_and_print_the_error() -> None:
        # If chatmill tried to allocate the model, this limit would make the allocation fail.
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        try:
            trained(sums_data, tmp_path, **sizes)
        except OutOfMemoryError as error:
            print(error)

    assert end_children([start_child(train_and_print_the_error, output=tmp_path)]) == [0]
    assert re.sub(r"[0-9.]+ GiB", "N GiB", (tmp_path / "out").read_text()) == HOST_IS_FULL


def test_a_failed_run_can_be_resumed_in_the_same_process(sums_data, tmp_path):
    def fail(step):
        if step.step == 5:
            raise RuntimeError("enough")

    settings = config(audit_dir=str(tmp_path / "logs"))
    with pytest.raises(RuntimeError, match="enough"):
        train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path, watch=fail, quiet=True)
    again = train_model(settings, model_name="run", dataset_dir=sums_data, out_dir=tmp_path, resume="auto", quiet=True)
    assert again.step == 8
    (log,) = (tmp_path / "logs").glob("audit_*.log")
    assert verify_log(log, sums_data).fault is None


@pytest.mark.parametrize("where", ["state-00000-of-00001.safetensors", "checkpoint.json", "training.json"])
def test_a_full_disk_is_a_one_line_error_and_the_last_checkpoint_is_kept(sums_data, tmp_path, monkeypatch, where):
    trained(sums_data, tmp_path, max_iters=4)

    names = {}

    class Full(files.Disk):
        def create(self, path):
            fd = super().create(path)
            names[fd] = path.name
            return fd

        def write(self, fd, data):
            if names.get(fd) == where:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Full())
        with pytest.raises((ChatmillError, OSError), match="No space left on device"):
            trained(sums_data, tmp_path, resume="auto")
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_00000004"]
    assert trained(sums_data, tmp_path, resume="auto").step == 8
    assert not list((tmp_path / "run").glob(".*"))
