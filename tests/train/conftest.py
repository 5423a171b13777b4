"""What the tests of training share: a dataset of sums, and one thread."""

from __future__ import annotations

import pytest
import torch
from train_fixtures import prepare

# Tests run beside one another, and some of them fork: threads of their own would be in the way of both.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sums_data(tmp_path_factory):
    """60 conversations about sums, a fifth of them for validation."""
    return prepare(tmp_path_factory.mktemp("data"), "sums", "--val-split", "0.2")
