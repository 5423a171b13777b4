"""Planted bugs in the code for checkpoints, audit logs, ranks and models, which the trials must detect."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_injection.trials import ranks


def checkpoint_hash_not_checked() -> None:
    from chatmill.train import checkpoint

    def size_alone(path: Path, info: Any) -> None:
        assert path.stat().st_size == info.size

    checkpoint._check = size_alone


def chain_not_checked() -> None:
    """Make `audit verify` accept any value as the hash of the previous log line."""
    from chatmill.audit import verify as audit_check
    from chatmill.audit.log import START, LogLine, TornLine

    read_log = audit_check.read_log

    def believing(path: Path) -> list[LogLine | TornLine]:
        previous, lines = START, []
        for line in read_log(path):
            if isinstance(line, LogLine):
                line = replace(line, previous=previous)
                previous = line.sha256
            lines.append(line)
        return lines

    audit_check.read_log = believing


def state_saved_before_the_log() -> None:
    """Make checkpoints record a hash whose line was never written to the audit log."""
    from chatmill.audit import AuditLog

    add = AuditLog.add

    def later(self: Any, action: str, fields: Any, *, durable: bool = False) -> str:
        if action != "checkpoint":
            return add(self, action, fields, durable=durable)
        return "0" * 64

    AuditLog.add = later


def losses_of_ranks_not_reported() -> None:
    ranks.FIRST.append(_no_report)


def _no_report() -> None:

    from chatmill.train import process_group

    process_group.lost_rank_errors = lambda *_: nullcontext()
    process_group.RankWatch = lambda *_: None


def unlisted_state_read() -> None:
    from chatmill.train import checkpoint

    checkpoint.unlisted = lambda folder, files: iter(())
    checkpoint.Checkpoint.state_files = lambda self: sorted(self.path.glob("state-*.safetensors"))


def cursor_believed() -> None:
    from chatmill.audit import recorder

    recorder._check_with_log = lambda state, path, plan: None


def pickles_loaded() -> None:
    import pickle

    from chatmill.train import model_files

    read_headers = model_files.read_headers

    def unpickled(folder: Path, weights: str, index: str | None = None) -> Any:
        for path in folder.iterdir():
            if path.suffix in model_files.PICKLES:
                pickle.loads(path.read_bytes())  # noqa: S301
        return read_headers(folder, weights, index)

    model_files.read_headers = unpickled


def data_not_hashed_again() -> None:
    from chatmill.train.data_check import DataCheck

    DataCheck._pass = lambda self: None


def ids_of_batches_believed() -> None:
    from chatmill.train import loop

    loop.unknown_id = lambda batch, vocab_size: None
