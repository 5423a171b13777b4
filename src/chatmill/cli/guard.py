"""What the user can mend is one line on standard error and an exit code; never a traceback."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import warnings
from collections.abc import Callable

from chatmill.errors import ChatmillError, one_line

EXTRAS = {"torch": "train", "safetensors": "train"}
"""Packages that whole commands stand on, and what brings them; those that one option needs are asked for there."""


def guarded(command: Callable[[], object]) -> None:
    """Run a command; faults end it with exit code 1, or 2 for usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="escaped")
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # it takes what it is given and more
    try:
        command()
    except ChatmillError as error:
        fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in EXTRAS:
            raise
        fail(f"this needs {package}, which is not installed; pip install 'chatmill[{EXTRAS[package]}]'", 2)
    except BrokenPipeError:
        # Whoever read our output has gone, which is not our fault and not worth a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{one_line(str(error.filename or 'input or output'))}: {error.strerror or error}", 1)
    except RecursionError:
        fail("something that was read is nested too deeply; expected fewer levels", 1)
    except MemoryError as error:
        # numpy says how much it was; Python says nothing.
        fail(f"not enough memory ({one_line(str(error)) or 'no more is to be had'}); ask for less at a time", 1)
    except KeyboardInterrupt:
        fail("stopped", 130)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""What an output cannot write, as `\udcff`: readable, and the same text again where it stands in JSON."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("escaped", _escaped)


def fail(line: str, code: int) -> None:
    print(f"chatmill: {line}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"chatmill: warning: {message}", file=sys.stderr)
