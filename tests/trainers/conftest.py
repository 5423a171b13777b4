"""Fixtures for tests with other trainers, which run in separate environments: see `make test-integrations`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "store"))

import trainer_fixtures


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run each file in one process, because its tests share slow fixtures."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Path:
    return trainer_fixtures.write_dataset(tmp_path_factory.mktemp("data") / "plain")


@pytest.fixture(scope="session")
def weighted(tmp_path_factory) -> Path:
    return trainer_fixtures.write_dataset(tmp_path_factory.mktemp("data") / "weighted", weights=(0.25, 0.5, 1, 3))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return trainer_fixtures.save_model(tmp_path_factory.mktemp("model") / "llama")
