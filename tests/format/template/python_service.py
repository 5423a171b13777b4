"""A service that runs arbitrary Python code in a locked-down process, as a template that escapes the sandbox could."""

from __future__ import annotations

FORBIDDEN = {
    "read a file": "out = open('/etc/hostname').read()",
    "read the environment": "out = open('/proc/self/environ').read()",
    "look for files": "import os; out = os.stat('/etc/hostname')",
    "list files": "import os; out = os.listdir('/')",
    "write a file": "out = open('/tmp/x', 'w')",
    "create a socket": "import socket; out = socket.socket()",
    "create a pipe": "import os; out = os.pipe()",
    "copy a descriptor": "import os; out = os.dup(0)",
    "fork": "import os; out = os.fork()",
    "run a program": "import os; os.execv('/bin/sh', ['sh'])",
    "start a program": "import subprocess; out = subprocess.run(['id'])",
    "kill its parent process": "import os; os.kill(os.getppid(), 9)",
    "see other processes": "import os; os.kill(1, 0)",
    "make code": "import mmap; out = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "sleep": "import time; time.sleep(9)",
}
"""Actions that are denied to Python code in a locked-down process."""


def respond(frame: bytes) -> bytes:
    """Run Python code; return the value of its variable `out`, or the error that it raises."""
    names: dict[str, object] = {}
    try:
        exec(frame.decode(), names)  # noqa: S102  # that is what it is for
    except BaseException as error:
        return f"{type(error).__name__}: {error}".encode()
    return repr(names.get("out")).encode()


def main() -> None:
    # No file can be opened later, so these modules are imported now.
    import ctypes  # noqa: F401
    import mmap  # noqa: F401
    import resource  # noqa: F401
    import socket  # noqa: F401
    import subprocess  # noqa: F401
    import threading  # noqa: F401

    from chatmill.format.template.process.fork_server import run_server

    run_server(lambda: respond)
