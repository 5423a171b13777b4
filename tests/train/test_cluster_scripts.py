"""Run the scripts in examples/cluster, with small programs in place of Slurm's `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_fixtures import SMALL, curve, trained

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "cluster"
STEPS = 100
PATIENCE = 200
SRUN = """
import os, signal, subprocess, sys
command = sys.argv[1:]
assert command.pop(0) == "--kill-on-bad-exit=1"
tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_JOB_NUM_NODES"])
started = []
for task in range(tasks):
    about = {"PROCID": task, "LOCALID": task % (tasks // nodes), "NODEID": task // (tasks // nodes)}
    variables = {f"SLURM_{name}": str(value) for name, value in about.items()}
    variables["SLURM_STEP_NUM_TASKS"] = str(tasks)
    started.append(subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True))
def forward(number, _):
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, number)
signal.signal(signal.SIGTERM, forward)
codes = [each.wait() for each in started]
sys.exit(max(abs(code) for code in codes))
"""
SCONTROL = """
import os, sys
if sys.argv[1:] == ["show", "hostnames", "node-[0-1]"]:
    print("127.0.0.1", "127.0.0.2", sep="\\n")
else:
    with open("scontrol.txt", "a") as file:
        print(*sys.argv[1:], file=file)
"""
SHOW = "import os, sys; print(os.path.basename(sys.argv[0]), *sys.argv[1:])"


@pytest.fixture
def cluster(sums_data, tmp_path):
    for name in ("train.py", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "small.json").write_text(json.dumps({**SMALL, "max_iters": STEPS, "save_interval": STEPS}))
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(cluster: Path, name: str, code: str) -> None:
    path = cluster / "bin" / name
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)


def start(cluster: Path, *command: str, **variables: str) -> subprocess.Popen:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = f"{cluster / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"NTASKS": "2", "JOB_NUM_NODES": "2", "JOB_NODELIST": "node-[0-1]", "JOB_ID": "7", "SUBMIT_DIR": str(cluster)}
    slurm = {f"SLURM_{name}": value for name, value in job.items()}
    environment = {**os.environ, **slurm, "MASTER_PORT": port, "PORT": port, "PATH": path, **variables}
    return subprocess.Popen(
        command, cwd=cluster, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def flags(cluster: Path, data: Path) -> list[str]:
    out = ["--out_dir", str(cluster / "runs"), "--config_file", str(cluster / "small.json")]
    return [*out, "--model_name", "mine", "--dataset_dir", str(data)]


def test_a_slurm_job_trains_like_one_process_and_is_requeued_before_its_time_limit(cluster, sums_data):
    program(cluster, "srun", SRUN)
    program(cluster, "scontrol", SCONTROL)
    metrics = cluster / "runs/mine/metrics.jsonl"
    job = start(cluster, "bash", str(SCRIPTS / "train.sbatch"), *flags(cluster, sums_data), DOCTOR="0")
    end = time.monotonic() + PATIENCE
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < end and job.poll() is None, job.communicate()
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, err
    assert "stopped by SIGTERM at step " in out
    assert out.endswith("the time limit is near: the run has stopped, and the job is requeued\n")
    assert (cluster / "scontrol.txt").read_text() == "requeue 7\n"
    before = len(curve(metrics.parent))
    assert 2 <= before < STEPS
    trained(sums_data, cluster / "runs", name="mine", resume="auto", max_iters=STEPS, save_interval=STEPS)
    trained(sums_data, cluster / "alone", max_iters=STEPS, save_interval=0)
    alone = [(step, pytest.approx(loss, rel=1e-3)) for step, loss in curve(cluster / "alone/run")]
    assert curve(metrics.parent) == alone


def test_torchrun_gets_the_rendezvous_of_the_nodes(cluster):
    for name in ("torchrun", "srun"):
        program(cluster, name, SHOW)
    program(cluster, "scontrol", SCONTROL)
    launcher = ["bash", str(SCRIPTS / "torchrun.sh"), "--model_name", "x"]
    common = {"NODES": "4", "HEAD": "a", "PORT": "5", "GPUS": "8"}
    out, _ = start(cluster, *launcher, **common).communicate()
    assert out == (
        "torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 0 --rdzv-backend c10d --rdzv-endpoint a:5 "
        "--rdzv-id chatmill train.py --resume auto --model_name x\n"
    )
    out, _ = start(cluster, *launcher, **common, NODE_RANK="3", DOCTOR="only").communicate()
    assert out == (
        "torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 0 --node-rank 3 --master-addr a --master-port 5 "
        "-m chatmill.train.doctor --model_name x\n"
    )
    program(cluster, "srun", "import os, sys; os.execvp(sys.argv[2], sys.argv[2:])")
    job = ["bash", str(SCRIPTS / "train.sbatch"), "--model_name", "x"]
    out, _ = start(cluster, *job, LAUNCHER="torchrun", MASTER_PORT="5", SLURM_GPUS_ON_NODE="8").communicate()
    told = "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:5 --rdzv-id 7.0 "
    assert out == f"{told}-m chatmill.train.doctor\n{told}train.py --resume auto --model_name x\n"
    wrong = start(cluster, *job, LAUNCHER="mpirun")
    assert (wrong.communicate()[1], wrong.returncode) == ("LAUNCHER is mpirun; expected srun or torchrun\n", 2)
