"""What every test stands on: property tests that give the same examples on every machine, and who runs which."""

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# No deadline and no "too slow": a busy machine must not fail a test that is right.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


class FilesAndPages(LoadScopeScheduling):
    """The tests of a file share what they make, so one process runs them; pages share nothing, and are long."""

    def _split_scope(self, nodeid):
        file, _ = nodeid.split("::", 1)
        return nodeid if file.endswith("test_docs.py") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FilesAndPages(config, log)
