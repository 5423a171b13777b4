from typing import Any as Buffer

def rows(
    x: Buffer,
    y: Buffer,
    loss_mask: Buffer,
    weights: Buffer,
    positions: Buffer,
    segments: Buffer,
    episode_ids: Buffer,
    counts: Buffer,
    tokens: list[Buffer],
    spans: list[Buffer],
    episodes: Buffer,
    first: Buffer,
    borders: Buffer,
    size: int,
    most_segments: int,
    width: int,
    pad: int,
    use_loss_mask: bool,
    pad_part: int,
    /,
) -> int: ...
