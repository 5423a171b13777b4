from typing import Any as Buffer

class Encoder:
    def __init__(
        self,
        *,
        pattern: int,
        whole: bool,
        classes: Buffer,
        byte_ids: Buffer,
        pairs: Buffer,
        into: Buffer,
        vocabulary: Buffer,
        places: Buffer,
        numbers: Buffer,
        added: Buffer,
    ) -> None: ...
    def encode(self, texts: list[str], normal: bool, /) -> tuple[bytes, bytes, list[int]]: ...
    def encode_columns(
        self,
        data: Buffer,
        start: Buffer,
        stop: Buffer,
        kind: Buffer,
        before: list[bytes],
        after: list[bytes],
        /,
    ) -> tuple[bytes, bytes, list[int]]: ...
