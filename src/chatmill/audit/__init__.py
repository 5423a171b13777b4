"""Write an audit log of the batches that a run trains on, and verify the log.

`Audit` is a loader listener that writes the log.
`verify_log` recomputes every line from the dataset, compares it with the log, and returns an `AuditResult`.
`replay_step` rebuilds the exact batch of a step as a `ReplayedStep`.
`saved_states` reads each `SavedState` from checkpoints, to compare it with the log.
`read_log` returns the lines of a log file, each as a `LogLine` or a `TornLine`.
`AuditLog` appends lines to a log file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from chatmill._exports import lazy_exports as _lazy_exports

if _TYPE_CHECKING:
    from chatmill.audit.log import AuditError as AuditError
    from chatmill.audit.log import AuditLog as AuditLog
    from chatmill.audit.log import LogLine as LogLine
    from chatmill.audit.log import TornLine as TornLine
    from chatmill.audit.log import parse_line as parse_line
    from chatmill.audit.log import read_log as read_log
    from chatmill.audit.log import write_line as write_line
    from chatmill.audit.recorder import Audit as Audit
    from chatmill.audit.saved_state import SavedState as SavedState
    from chatmill.audit.saved_state import saved_states as saved_states
    from chatmill.audit.verify import AuditResult as AuditResult
    from chatmill.audit.verify import MismatchError as MismatchError
    from chatmill.audit.verify import ReplayedStep as ReplayedStep
    from chatmill.audit.verify import replay_step as replay_step
    from chatmill.audit.verify import verify_log as verify_log

__all__, __getattr__, __dir__ = _lazy_exports(__name__)
