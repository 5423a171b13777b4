"""Report the error of a command as one line on standard error, with an exit code and without a traceback."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from chatmill.cli.streams import standard_streams
from chatmill.errors import ChatmillError, one_line, system_fault

EXTRAS = {"torch": "train", "safetensors": "train"}
"""Packages that some commands need, and the extra that installs each package."""


def guarded(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit with its code: 0, 1 after an error, 2 after a usage error, or 130 after Ctrl-C."""
    with standard_streams():
        warnings.showwarning = _show_warning  # type: ignore[assignment]  # accepts extra arguments
        code = _exit_code(command)
        # Flush now rather than at interpreter exit, so that a write error is reported and sets the exit code.
        if code == 0:
            code = _exit_code(sys.stdout.flush)
        else:
            with suppress(OSError, SystemExit):
                sys.stdout.flush()
        group = sys.modules.get("chatmill.train.process_group")
        if group is not None and group.has_joined:
            _end_rank(code)
        sys.exit(code)


def _end_rank(code: int) -> NoReturn:
    """Exit a rank of a distributed run without running C++ destructors.

    Destructors could abort a process that has finished its work, because threads of torch process groups may still use
    the destroyed objects.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_code(command: Callable[[], object]) -> int:
    try:
        command()
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            return ended.code or 0
        return _report(ended.code, 1)
    except ChatmillError as error:
        return _report(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in EXTRAS:
            raise
        return _report(f"{package} is not installed; run pip install 'chatmill[{EXTRAS[package]}]'", 2)
    except OSError as error:
        return _report(system_fault(error), 1)
    except RecursionError:
        return _report("the input is nested too deeply; expected fewer levels", 1)
    except MemoryError as error:
        # The message of numpy's MemoryError contains the requested size; Python's MemoryError has no message.
        return _report(
            f"not enough memory ({one_line(str(error)) or 'allocation failed'}); process less data at a time", 1
        )
    except KeyboardInterrupt:
        return _report("stopped", 130)
    return 0


def _report(line: str, code: int) -> int:
    print_error(line)
    return code


def print_error(line: str) -> None:
    """Print one line on standard error, with control characters escaped."""
    print(f"chatmill: {one_line(line, None)}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: object) -> None:
    print_error(f"warning: {message}")
