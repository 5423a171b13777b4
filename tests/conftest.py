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

# On a busy machine, Hypothesis's deadlines and its "too slow" check would make correct tests fail.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

# A shell makes background processes ignore Ctrl-C. Restore the default handlers, because child processes inherit
# ignored signals and some tests interrupt child processes.
for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)

# `make test-integrations` runs these tests in separate environments.
collect_ignore = ["trainers"]

process_watch.mark_children()
# Child processes must buffer their output as they do when a user starts them.
os.environ.pop("PYTHONUNBUFFERED", None)
# With token authentication, a process that has used one Ray cluster cannot start another with a different home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
# Disable the tokenizer cache, because tests must not depend on its content. The tests of the cache enable it again.
os.environ["CHATMILL_TOKENIZER_CACHE"] = "0"


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """If a test times out, end the processes that it started and print their stacks."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)

    def end_processes_and_fail(number, frame):
        print(process_watch.end_with_stacks(process_watch.started_processes()), file=sys.stderr)
        fail(number, frame)

    if settings.method == "signal" and callable(fail):
        signal.signal(signal.SIGALRM, end_processes_and_fail)
    return result


def pytest_make_parametrize_id(val, argname):
    """Use the parameter name as the test id of a bytes value, because the value may differ between processes."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items):
    for item in items:
        if CLUSTER.search(item.path.as_posix()):
            item.add_marker(pytest.mark.cluster)
        if any(part in item.nodeid for part in EXAMPLES):
            item.add_marker(pytest.mark.examples)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if (nextitem is None or nextitem.path != item.path) and (left := process_watch.wait_for_all()):
        pytest.fail(f"processes left behind by {item.path.name}: {process_watch.end_with_stacks(left)}", pytrace=False)
    return result


class FilesAndPages(LoadScopeScheduling):
    """Run the tests of a file in one process, because they share fixtures. The tests of docs pages are slow, so they
    are distributed one by one.

    Test files that start Ray run one after the other, because two Ray clusters that start at the same time can
    deadlock.
    """

    def _split_scope(self, nodeid):
        file, _ = nodeid.split("::", 1)
        if file.endswith("test_docs.py"):
            return nodeid
        return "ray" if "prepare/test_ray" in file else file

    # The methods below avoid two bugs in xdist 3.8. xdist raises KeyError if it schedules work for a process that is
    # still collecting tests, and it repeats a test that crashed a process.

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
