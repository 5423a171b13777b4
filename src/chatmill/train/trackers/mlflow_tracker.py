"""MLflow tracker.

The MLflow client reads MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_TRACKING_TOKEN and other environment
variables.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatmill.errors import UsageError, one_line
from chatmill.train.trackers.interface import SampleAnswer, Status, TrackedRun, flat

EXPERIMENT = "chatmill"
"""The default experiment, which MLFLOW_EXPERIMENT_NAME overrides."""
REFUSED = ("INVALID_PARAMETER_VALUE", "UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")
"""MLflow error codes for a wrong setting or missing credentials."""
STATES: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
BATCH = 100
"""Maximum number of parameters per request to MLflow."""
LONGEST_NAME, LONGEST_VALUE = 250, 6000


class MlflowTracker:
    """An MLflow run. The low-level client does not log the source code, the user name or system metrics."""

    name = "mlflow"
    _client: Any
    _id: str

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise UsageError(f"mlflow cannot be imported ({one_line(str(error), 200)}); reinstall mlflow") from None
        # Silence mlflow, which logs the creation of its tables, and a traceback for every database error that it
        # raises.
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", module=r"mlflow\.")
        try:
            self._client = MlflowClient()
            self._id = self._resumed(run) or self._created(run)
        except MlflowException as error:
            if error.error_code not in REFUSED:
                raise
            raise UsageError(f"mlflow: {one_line(str(error), 300)}; check MLFLOW_TRACKING_URI") from None
        except ImportError as error:
            reason = one_line(str(error), 200)
            raise UsageError(f"mlflow: {reason}; pip install 'chatmill[mlflow]', or use a tracking server") from None
        self._log_config(run)
        return self._id

    def _resumed(self, run: TrackedRun) -> str | None:
        """Reopen the run with the id `run.id`; return None if this server does not have the run."""
        from mlflow.exceptions import MlflowException

        if run.id is None:
            return None
        try:
            self._client.update_run(run.id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run.id

    def _created(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            existing = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        return str(self._client.create_run(experiment, run_name=run.name).info.run_id)

    def _log_config(self, run: TrackedRun) -> None:
        """Log the config as parameters.

        MLflow parameters are immutable, so values that differ after resuming are logged as one tag.
        """
        from mlflow.entities import Param

        config = flat(run.config)
        texts = {valid_name(name): _text(value)[:LONGEST_VALUE] for name, value in config.items()}
        logged = self._client.get_run(self._id).data.params
        new = [Param(name, value) for name, value in texts.items() if name not in logged]
        for start in range(0, len(new), BATCH):
            self._client.log_batch(self._id, params=new[start : start + BATCH])
        if changed := {name: value for name, value in texts.items() if logged.get(name, value) != value}:
            self._client.set_tag(self._id, f"resumed_at_step_{run.step}", json.dumps(changed)[:LONGEST_VALUE])

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(valid_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        text = json.dumps([sample._asdict() for sample in samples], indent=1, ensure_ascii=False)
        self._client.log_text(self._id, text, f"samples/step_{step:08d}.json")

    def log_artifact(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path))

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, STATES[status])


def valid_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in names. If the name changes, add a checksum to keep it
    unique.

    >>> valid_name("val_loss/chat"), valid_name("val_loss/a+b")
    ('val_loss/chat', 'val_loss/a_b-ea3e4e30')
    """
    clean = re.sub(r"[^\w/.\- :]", "_", name)
    # Normalize the name, because MLflow treats names as relative paths.
    clean = "/".join("_" if part in ("", ".", "..") else part for part in clean.split("/"))[: LONGEST_NAME - 9]
    return clean if clean == name else f"{clean}-{zlib.crc32(name.encode('utf-8', 'surrogatepass')):08x}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
