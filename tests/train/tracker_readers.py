"""Read the logged metrics of a run from the files of TensorBoard, W&B and MLflow, as tuples (step, name, value)."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Logged = tuple[int, str, float]


def numbers_of(lines: Sequence[Mapping[str, Any]]) -> list[Logged]:
    return [
        (line["step"], name, float(value))
        for line in lines
        for name, value in line.items()
        if name != "step" and value is not None
    ]


# TensorBoard.


def open_events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def tensorboard_numbers(run: Path) -> list[Logged]:
    events = open_events(run)
    return [(each.step, tag, each.value) for tag in events.Tags()["scalars"] for each in events.Scalars(tag)]


def tensorboard_texts(run: Path, tag: str) -> list[tuple[int, str]]:
    """Return the logged texts of a TensorBoard tag, without the indentation that makes TensorBoard display them
    verbatim.
    """
    shown = open_events(run).Tensors(f"{tag}/text_summary")
    texts = [each.tensor_proto.string_val[0].decode() for each in shown]
    return [
        (each.step, "\n".join(line[4:] for line in text.split("\n"))) for each, text in zip(shown, texts, strict=True)
    ]


# W&B.

BLOCK, HEADER = 32768, 7


def wandb_folders(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_ctime_ns)


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records that the W&B client wrote for an offline run. The file consists of a header and a LevelDB log
    of protocol buffers.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("run-*.wandb")
    data, at, whole = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        checksum, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + HEADER : at + HEADER + size]
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == checksum
        at += HEADER + size
        full, first, last = kind == 1, kind == 2, kind == 4
        whole = part if full or first else whole + part
        if full or last:
            record = Record()
            record.ParseFromString(whole)
            yield record


def wandb_values(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def wandb_numbers(folder: Path) -> list[Logged]:
    histories = [wandb_values(each.history.item) for each in wandb_records(folder) if each.HasField("history")]
    lines = [
        {name: value for name, value in history.items() if name[0] != "_" and not name.startswith("samples.")}
        for history in histories
    ]
    return numbers_of(lines)


def wandb_config(folder: Path) -> dict[str, Any]:
    [run] = [each.run for each in wandb_records(folder) if each.HasField("run")]
    return {**wandb_values(run.config.update), "run_id": run.run_id, "project": run.project, "name": run.display_name}


def wandb_tables(folder: Path) -> list[Any]:
    paths = sorted((folder / "files").rglob("*.table.json"))
    return [json.loads(path.read_bytes()) for path in paths]


def wandb_artifacts(folder: Path) -> dict[str, bytes]:
    """Return the contents of W&B artifact files by name. The W&B client keeps copies of these files until they are
    uploaded.
    """
    entries = [entry for each in wandb_records(folder) for entry in each.artifact.manifest.contents]
    return {entry.path: Path(entry.local_path).read_bytes() for entry in entries}


def wandb_exit(folder: Path) -> tuple[bool, int]:
    records = list(wandb_records(folder))
    [code] = [each.exit.exit_code for each in records if each.HasField("exit")]
    return any(each.HasField("preempting") for each in records), code


# MLflow.


def mlflow_runs() -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    return client.search_runs([each.experiment_id for each in client.search_experiments()])


def mlflow_numbers(run: Any) -> list[Logged]:
    from mlflow import MlflowClient

    client = MlflowClient()
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return [(each.step, each.key, each.value) for history in histories for each in history]


def mlflow_artifacts(run: Any, folder: Path) -> dict[str, bytes]:
    from mlflow import MlflowClient

    copied = Path(MlflowClient().download_artifacts(run.info.run_id, "", str(folder)))
    return {str(path.relative_to(copied)): path.read_bytes() for path in copied.rglob("*") if path.is_file()}
