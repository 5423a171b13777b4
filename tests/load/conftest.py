from __future__ import annotations

from pathlib import Path

import pytest
from load_fixtures import talks, write_rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("loader") / "d", {"train": talks(1, 30), "val": talks(2, 9)})
