"""How a training run uses the settings in `chatmill.toml`.

tokenizer.path               compared with the tokenizer of the caches
training.seed                seed, epoch_seed
model.T                      block_size, and also max_positions if model.T exceeds its default
data.caches.sft_token_cache  dataset_dir
data.mix_sft                 mix_sft, if dataset_dir is a folder of caches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from chatmill.config import keys_of
from chatmill.errors import DataError, UsageError, one_line
from chatmill.load.mix import MIX_SFT
from chatmill.plain_file import local_path
from chatmill.remote.urls import Url, place
from chatmill.settings import CACHE_ROOT, CONTEXT, FILE, MIXED, SEED, TOKENIZER, read_settings
from chatmill.store.primer_cache import CACHES, PrimerCache, cache_folder, is_cache, open_cache
from chatmill.store.read import is_dataset
from chatmill.train.config import TrainConfig
from chatmill.train.sharded_tensors import file_info

TokenizerHash = Callable[[str], str | None]
"""A function that returns the hash of the tokenizer at a path, or None if the required packages are not installed."""


def project_settings() -> dict[str, Any]:
    """Read the settings in `chatmill.toml`, if it exists; raise one `UsageError` that lists all its problems."""
    settings, faults = read_settings()
    if faults:
        raise UsageError("; ".join(faults))
    return settings


def project_keys(settings: Mapping[str, Any], dataset_dir: object) -> dict[str, Any]:
    """Convert the settings to training config keys.

    `dataset_dir` is the value from the flags or the config file, or None.
    """
    keys: dict[str, Any] = {}
    if SEED in settings:
        keys |= {"seed": settings[SEED], "epoch_seed": settings[SEED]}
    if CONTEXT in settings:
        keys["block_size"] = settings[CONTEXT]
        if settings[CONTEXT] > keys_of(TrainConfig)["max_positions"].default:
            keys["max_positions"] = settings[CONTEXT]
    if CACHE_ROOT in settings:
        keys["dataset_dir"] = settings[CACHE_ROOT]
    # Set mix_sft only for a folder of caches, because a single dataset is not mixed.
    if MIXED in settings and not _is_source(Path(str(dataset_dir or settings.get(CACHE_ROOT, CACHES)))):
        keys["mix_sft"] = settings[MIXED]
    return keys


def _is_source(folder: Path) -> bool:
    return is_cache(folder) or is_dataset(folder)


def compare_tokenizer(
    settings: Mapping[str, Any], config: TrainConfig, tokenizer_sha256: TokenizerHash | None
) -> Iterator[str]:
    """Raise `DataError` if a cache was not built with the tokenizer in the settings.

    If the tokenizers cannot be compared, yield a note with the reason.
    """
    if TOKENIZER not in settings or not config.check_tokenizer:
        return
    path, caches = local_path(settings[TOKENIZER]), list(_caches(config))
    if path.is_file() and all(cache.meta.tokenizer_sha256 == file_info(path).sha256 for cache in caches):
        # Compare the hash of the tokenizer file first, because opening the tokenizer is slow. If tokens were added to
        # the tokenizer for the cache, the hash in the cache differs from the hash of the file.
        return
    named = f"{FILE}: {TOKENIZER} is {one_line(str(path))}"
    if str(path) != "bytes" and not path.exists():
        yield f"{named}, which does not exist, so it is not compared with the tokenizer of the caches"
        return
    sha256 = None if tokenizer_sha256 is None else tokenizer_sha256(str(path))
    if sha256 is None:
        yield f"{named}, which cannot be opened here, so it is not compared with the tokenizer of the caches"
        return
    others = [cache for cache in caches if cache.meta.tokenizer_sha256 != sha256]
    if faults := [f"{each.path}: was built with tokenizer {each.meta.tokenizer_sha256[:12]}…" for each in others]:
        raise DataError(
            f"{'; '.join(faults)}; {named} ({sha256[:12]}…); rebuild the cache with chatmill "
            f"build-sft-{others[0].meta.source} --overwrite, or change {TOKENIZER}"
        )


def _caches(config: TrainConfig) -> Iterator[PrimerCache]:
    """Yield the caches that a run reads; the loader reports missing caches."""
    root = place(config.dataset_dir or CACHES)
    if isinstance(root, Url):
        # Skip URLs, because only local folders contain caches.
        return
    folders = [root] if _is_source(root) else [cache_folder(root, name) for name in config.mix or MIX_SFT]
    yield from (open_cache(folder) for folder in folders if is_cache(folder))
