"""Run units in workers that are forked from a new process, for a caller that has threads.

A fork copies the locks that other threads hold, but not the threads: a worker forked while another thread encodes may
deadlock. The new process has no other Python threads; it loads the renderer of the job and forks the workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from chatmill.errors import ChatmillError
from chatmill.format import Renderer
from chatmill.prepare.job import Job
from chatmill.prepare.unit import Done, Unit, renderer_identity, same_renderer
from chatmill.remote.named_files import copies_made, use_copies

SERVE = "from chatmill.prepare.fresh_process import serve; serve()"


def run_in_fresh_process(
    units: Sequence[Unit], job: Job, renderer: Renderer, folder: Path, *, workers: int
) -> Generator[Done, None, None]:
    """Like `LocalEngine.run`, but fork the workers from a new process."""
    pipe, its_end = Pipe()
    with its_end:
        # Use a separate process group, so that Ctrl-C reaches only this process, which then closes the generator.
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=its_end.fileno(),
            # Keep output printed by libraries out of the results.
            stdout=2,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,
        )
    try:
        pipe.send((units, job, renderer_identity(renderer), folder, workers, copies_made()))
        for _ in units:
            result = pipe.recv()
            if isinstance(result, BaseException):
                raise result
            yield result
    except (EOFError, ConnectionError):
        raise ChatmillError(
            "the process that runs the workers was killed, perhaps because memory ran out; continue with --resume"
        ) from None
    finally:
        # Workers exit when this end of the pipe is closed.
        pipe.close()
        process.wait()


# Code that runs in the new process.


def serve() -> None:
    """Run the units received on standard input, and send back a result or an error for each."""
    from chatmill.prepare.engine import LocalEngine

    try:
        with Connection(os.dup(0)) as pipe:
            units, job, identity, folder, workers, copies = pipe.recv()
            try:
                # Use the copies of remote files that the parent made, because a download would start threads.
                use_copies(copies)
                engine = LocalEngine(workers, parent=pipe.fileno())
                with closing(engine.run(units, job, same_renderer(job, identity), folder)) as running:
                    for done in running:
                        pipe.send(done)
            except (ChatmillError, OSError) as error:
                pipe.send(error)
    except (EOFError, ConnectionError):
        os._exit(1)
