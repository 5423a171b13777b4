"""What every test stands on: property tests that give the same examples on every machine, and who runs which."""

import pytest
from hypothesis import HealthCheck, settings

# No deadline and no "too slow": a busy machine must not fail a test that is right.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

PAGES = "test_docs.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The tests of a file share what they make, so one process runs them; pages share nothing, and are long."""
    items.sort(key=lambda item: item.path.name != PAGES)
    for item in items:
        if item.path.name != PAGES:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
