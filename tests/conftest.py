"""What every test stands on: property tests that give the same examples on every machine."""

from hypothesis import HealthCheck, settings

# No deadline and no "too slow": a busy machine must not fail a test that is right.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
