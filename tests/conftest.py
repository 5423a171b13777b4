"""What every test stands on: property tests that give the same examples on every machine, and who runs which."""

import os
import signal
import sys

import process_watch
import pytest
from hypothesis import HealthCheck, settings
from remote.servers import (  # noqa: F401 (fixtures)
    az,
    az_server,
    gs,
    gs_server,
    hf,
    hf_server,
    rclone,
    rclone_server,
    s3,
    s3_server,
    web,
    web_server,
)
from slower_tests import CLUSTER, EXAMPLES
from xdist.scheduler import LoadScopeScheduling

# No deadline and no "too slow": a busy machine must not fail a test that is right.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

# A shell ignores Ctrl-C for what it starts in the background, and so would every process that a test sends it to.
for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

# `make test-integrations` runs these, in environments of their own.
collect_ignore = ["trainers"]

process_watch.mark_children()
# Processes hold their output back as they do for a user, whatever the machine of the tests is set to.
os.environ.pop("PYTHONUNBUFFERED", None)
# A process that was in a Ray cluster with a token cannot start one whose nodes have other home folders.
os.environ["RAY_AUTH_MODE"] = "disabled"
# No test depends on what another one, or the user, left in the cache of tokenizers; its own tests turn it on.
os.environ["CHATMILL_TOKENIZER_CACHE"] = "0"


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """A test that takes too long fails with the stacks of the processes that it started, which end first."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)

    def end_processes_and_fail(number, frame):
        print(process_watch.end_with_stacks(process_watch.started_processes()), file=sys.stderr)
        fail(number, frame)

    if settings.method == "signal" and callable(fail):
        signal.signal(signal.SIGALRM, end_processes_and_fail)
    return result


def pytest_make_parametrize_id(val, argname):
    """Name bytes by their parameter: content such as a compression time would differ between test processes."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items):
    for item in items:
        if CLUSTER.search(item.path.as_posix()):
            item.add_marker(pytest.mark.cluster)
        if any(part in item.nodeid for part in EXAMPLES):
            item.add_marker(pytest.mark.examples)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """A process that is left behind by the tests of a file is a fault of its last test."""
    result = yield
    if (nextitem is None or nextitem.path != item.path) and (left := process_watch.wait_for_all()):
        pytest.fail(f"left behind by {item.path.name}: {process_watch.end_with_stacks(left)}", pytrace=False)
    return result


class FilesAndPages(LoadScopeScheduling):
    """Each file runs in one process, because its tests share fixtures; pages of the docs are long and share nothing.

    Files that start Ray run after each other: two clusters that start at once can wait for each other in vain.
    """

    def _split_scope(self, nodeid):
        file, _ = nodeid.split("::", 1)
        if file.endswith("test_docs.py"):
            return nodeid
        return "ray" if "prepare/test_ray" in file else file

    # xdist 3.8 gives work to a process that has not collected its tests yet, which is a KeyError, and runs a test
    # that ended its process again, as often as it may start processes.

    def _reschedule(self, node):
        if node in self.registered_collections:
            super()._reschedule(node)

    def remove_node(self, node):
        tests = self.assigned_work[node]
        crashed = next((test for unit in tests.values() for test, done in unit.items() if not done), None)
        if crashed is not None:
            tests[self._split_scope(crashed)][crashed] = True
            self.workqueue.update({scope: unit for scope, unit in tests.items() if not all(unit.values())})
        del self.assigned_work[node]
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FilesAndPages(config, log)
