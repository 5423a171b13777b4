from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from trainer_fixtures import free_port


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
