from typing import Any as Buffer

def positions(
    ids: Buffer,
    byte_lengths: Buffer,
    start: Buffer,
    stop: Buffer,
    size: Buffer,
    offset: Buffer,
    position: Buffer,
    inside: Buffer,
    exact: Buffer,
    /,
) -> bool: ...
