"""Run units from a new process, for a caller that has threads.

A fork copies the locks that other threads hold, but not the threads: a worker forked while another thread encodes may
wait for ever. The new process has no thread of Python's besides its own, loads the renderer that the job names, and
forks the workers.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from chatmill.errors import ChatmillError
from chatmill.format import Renderer
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Unit, renderer_identity, same_renderer

SERVE = "from chatmill.prepare.fresh_process import serve; serve()"


def run_in_fresh_process(
    units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path, *, workers: int
) -> Generator[Done, None, None]:
    """As `LocalEngine.run`. Nothing writes to the folder any more when the generator is closed or this process ends."""
    # Of a process group of its own: Ctrl-C is for this process, which then closes the generator.
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        try:
            process.stdin.write(pickle.dumps((units, job, renderer_identity(renderer), folder, workers)))
            process.stdin.flush()
            for _ in units:
                result = pickle.load(process.stdout)  # noqa: S301 - from our own process
                if isinstance(result, BaseException):
                    raise result
                yield result
        except (EOFError, BrokenPipeError):
            raise ChatmillError(
                "the process that runs the workers was killed, perhaps for lack of memory; go on with --resume"
            ) from None
    finally:
        # The workers watch its other end.
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


# In the new process.


def serve() -> None:
    """Run the units that come on standard input, and write a result or an error for each to standard output."""
    from chatmill.prepare.engine import LocalEngine

    # What a library prints goes elsewhere.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    units, job, identity, folder, workers = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own process
    try:
        try:
            renderer = same_renderer(job, identity)
            engine = LocalEngine(workers, parent=sys.stdin.fileno())
            with closing(engine.run(units, job, renderer, folder)) as running:
                for done in running:
                    pickle.dump(done, out)
                    out.flush()
        except (ChatmillError, OSError) as error:
            pickle.dump(error, out)
            out.flush()
    except BrokenPipeError:
        os._exit(1)
