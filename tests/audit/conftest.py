from __future__ import annotations

import pytest
from audit_fixtures import make_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data") / "chat", train=50)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder / "a", train=20, seed=1)
    make_dataset(folder / "b", train=33, seed=2)
    return folder
