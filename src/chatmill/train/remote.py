"""Support for runs with data at a URL: the config stored in the run folder, the local cache, and the download
progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from chatmill.errors import UsageError
from chatmill.load.loader import EpisodeLoader
from chatmill.remote.cache_settings import cache_folder, cache_size, configure
from chatmill.remote.urls import Place, Url, place
from chatmill.train.config import TrainConfig

SECONDS = 5.0
"""Time between progress lines, in seconds."""


def storable_config(config: TrainConfig, data: Place) -> TrainConfig:
    """Return the config to store in the run folder, with passwords and signatures removed from the dataset URL."""
    if isinstance(model := place(config.init_from_model or ""), Url) and str(model) != model.address:
        raise UsageError(
            f"{model}: init_from_model is a URL with credentials, which are not stored; download the model and "
            "pass its folder"
        )
    return replace(config, dataset_dir=str(data)) if isinstance(data, Url) else config


def configure_cache(config: TrainConfig, data: Place) -> None:
    """Configure the local cache of remote files. If the data of the run is at a URL, also check the cache settings."""
    configure(config.cache_dir, config.cache_size)
    if isinstance(data, Url):
        cache_folder()
        cache_size()


@contextmanager
def shown_downloads(loader: EpisodeLoader | None, say: Callable[[str], None]) -> Iterator[None]:
    """Print the download progress of a loader every few seconds while the `with` block runs, until all downloads are
    done.
    """
    if loader is None or loader.downloads is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(loader, say, ended), name="chatmill-downloads", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(loader: EpisodeLoader, say: Callable[[str], None], ended: threading.Event) -> None:
    before, last = 0, time.monotonic()
    while not ended.wait(SECONDS):
        if (now := loader.downloads) is None or now.objects == now.all_objects:
            return
        rate = (now.bytes - before) / (time.monotonic() - last)
        before, last = now.bytes, time.monotonic()
        say(
            f"downloading: {now.objects:,} of {now.all_objects:,} files, "
            f"{now.bytes / 1e6:,.0f} of {now.all_bytes / 1e6:,.0f} MB, {rate / 1e6:,.0f} MB/s"
        )
