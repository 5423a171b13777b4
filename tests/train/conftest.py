from __future__ import annotations

import pytest
import torch
from train_fixtures import prepare

# Tests run in parallel, and a fork of a process with threads can deadlock.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sums_data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"), "sums", "--val-split", "0.2")
