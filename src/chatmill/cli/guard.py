"""Errors at the command line: one line on standard error and an exit code, never a traceback."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import warnings
from collections.abc import Callable

from chatmill.errors import ChatmillError, one_line, system_fault

EXTRAS = {"torch": "train", "safetensors": "train"}
"""Packages that whole commands need, and the extra that installs them."""


def guarded(command: Callable[[], object]) -> None:
    """Run a command; an error ends the process with exit code 1, or 2 for wrong usage."""
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
        # The reader of our output is gone, as with `| head`: no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(system_fault(error), 1)
    except RecursionError:
        fail("something that was read is nested too deeply; expected fewer levels", 1)
    except MemoryError as error:
        # numpy says how much memory it was; Python says nothing.
        fail(f"not enough memory ({one_line(str(error)) or 'no more is to be had'}); ask for less at a time", 1)
    except KeyboardInterrupt:
        fail("stopped", 130)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    r"""Characters that an output cannot write, as JSON escapes such as `\udcff`."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("escaped", _escaped)


def fail(line: str, code: int) -> None:
    print(f"chatmill: {line}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"chatmill: warning: {message}", file=sys.stderr)
