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
def byte_pairs(data: Buffer, first: int, is_second: Buffer, /) -> bytes: ...
def ids_in_range(ids: Buffer, first: int, last: int, /) -> bytes: ...
