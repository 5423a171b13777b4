"""The audit log: which batches a run was trained on, and the proof that the log is right.

Audit                      a listener of the loader that writes the log
verify_log, AuditResult    recompute every line from the dataset, and compare
replay_step, ReplayedStep  the exact batch of a step
read_log, LogLine, …       the file itself, line by line
"""

from chatmill.audit.log import AuditError, AuditLog, LogLine, TornLine, parse_line, read_log, write_line
from chatmill.audit.recompute import MismatchError
from chatmill.audit.recorder import Audit
from chatmill.audit.replay import ReplayedStep, replay_step
from chatmill.audit.verify import AuditResult, verify_log

__all__ = [
    "Audit",
    "AuditError",
    "AuditLog",
    "AuditResult",
    "LogLine",
    "MismatchError",
    "ReplayedStep",
    "TornLine",
    "parse_line",
    "read_log",
    "replay_step",
    "verify_log",
    "write_line",
]
