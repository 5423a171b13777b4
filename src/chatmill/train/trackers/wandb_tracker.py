"""Weights & Biases tracker.

The W&B client reads WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY, WANDB_DIR and other environment variables.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatmill.errors import UsageError, one_line
from chatmill.store import files
from chatmill.train.trackers.interface import SampleAnswer, Status, TrackedRun

PROJECT = "chatmill"
"""The default W&B project."""
LEAST = (0, 30)
"""The oldest supported version of wandb, which has all settings in `REPORT_NOTHING_ELSE`."""
CONNECT_SECONDS = 20.0
FINISH_SECONDS = 60.0
REPORT_NOTHING_ELSE: Mapping[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "host": "",
    "program": "",
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings that turn off uploads of console output, code, command line, host name, hardware, package list and system
metrics.
"""


class WandbTracker:
    """A W&B run. Each line of metrics becomes a row in the W&B history, with the training step as the x axis."""

    name = "wandb"
    _run: Any

    def start(self, run: TrackedRun) -> str:
        # Turn off the W&B client's own error reporting.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise UsageError(f"wandb cannot be imported ({one_line(str(error), 200)}); reinstall wandb") from None
        if tuple(int(part) for part in re.findall(r"\d+", wandb.__version__)[:2]) < LEAST:
            raise UsageError(f"wandb {wandb.__version__} is too old; pip install 'chatmill[wandb]'")
        self._wandb = wandb
        with _hooks_kept():
            try:
                settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
                online = settings.mode in ("online", "run", "shared")
                if online and not wandb.login(prompt=False, verify=False):
                    raise UsageError(
                        "report_to contains wandb, but W&B credentials are missing; run `wandb login`, set "
                        "WANDB_API_KEY, or keep the run on disk with WANDB_MODE=offline"
                    )
                self._run = self._init_or_stay_offline(run, settings, online=online)
            except (wandb.errors.UsageError, wandb.errors.AuthenticationError, ValueError) as error:
                raise UsageError(f"wandb: {one_line(' '.join(str(error).split()), 300)}") from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def _init_or_stay_offline(self, run: TrackedRun, settings: Any, *, online: bool) -> Any:
        """Start the run; without a connection, store the run on disk."""
        try:
            return self._init(run, settings, online=online)
        except self._wandb.errors.CommError as error:
            if not online or isinstance(error, self._wandb.errors.AuthenticationError):
                raise
            offline = self._init(run, settings, online=False)
            reason = one_line(" ".join(str(error).split()), 200)
            warnings.warn(f"wandb: {reason}; the run is stored offline; upload it with `wandb sync`", stacklevel=2)
            return offline

    def _init(self, run: TrackedRun, settings: Any, *, online: bool) -> Any:
        own_folder = "WANDB_DIR" not in os.environ
        if own_folder:
            files.make_folder(run.folder)
        return self._wandb.init(
            project=None if settings.project else PROJECT,
            name=None if settings.run_name else run.name,
            dir=str(run.folder) if own_folder else None,
            config=dict(run.config),
            id=run.id,
            # An offline run with the same id gets a second folder, and `wandb sync` merges both folders into one run.
            resume="allow" if online and run.id is not None else None,
            mode=settings.mode if online or settings.mode == "disabled" else "offline",
            reinit="create_new",
            settings=self._wandb.Settings(
                **REPORT_NOTHING_ELSE,
                silent=True,
                symlink=False,
                allow_val_change=True,
                init_timeout=CONNECT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        table = self._wandb.Table(columns=list(SampleAnswer._fields), data=[list(sample) for sample in samples])
        self._run.log({"step": step, "samples": table})

    def log_artifact(self, path: Path) -> None:
        artifact = self._wandb.Artifact(re.sub(r"[^\w.-]", "_", f"{self._run.id}-{path.name}"), type="report")
        # Let the client copy the file, because chatmill may replace the file before an offline run is uploaded.
        artifact.add_file(str(path), skip_cache=True)
        self._run.log_artifact(artifact)

    def finish(self, status: Status) -> None:
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


@contextmanager
def _hooks_kept() -> Iterator[None]:
    """Restore `sys.exit` and `sys.excepthook`, which the W&B client replaces."""
    before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = before
