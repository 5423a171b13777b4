"""SentencePiece models, used by Llama 2, Gemma and older Mistral models."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from chatmill.errors import UsageError
from chatmill.tokenizer.backend import Ids, Offsets, aliases, faults_of, flat, is_markup


class SentencePiece:
    """A loaded SentencePiece model. Control pieces, and user-defined pieces that look like control tokens, never match
    text.
    """

    engine = "sentencepiece"

    def __init__(self, place: str, raw: bytes, *, control: Collection[str]) -> None:
        try:
            import sentencepiece
            from sentencepiece import sentencepiece_model_pb2
        except ImportError as error:
            message = f"{place}: a SentencePiece model requires sentencepiece; pip install 'chatmill[sentencepiece]'"
            raise UsageError(message) from error
        with faults_of(place, "cannot load the SentencePiece model", "the file is damaged or truncated"):
            model = sentencepiece_model_pb2.ModelProto.FromString(raw)
            kind = sentencepiece_model_pb2.ModelProto.SentencePiece.Type
            self.control = {
                piece.piece: id
                for id, piece in enumerate(model.pieces)
                if piece.type == kind.CONTROL
                or (piece.type == kind.USER_DEFINED and is_markup(piece.piece))
                or (piece.type not in (kind.UNKNOWN, kind.BYTE) and piece.piece in control)
            }
            for token, name in aliases(self.control).items():
                # Rename the piece, because BPE models match single-character pieces in text even if they are control
                # pieces.
                model.pieces[self.control[token]].piece = name
            # Remove the self-test samples, because their expected pieces may have been renamed.
            model.ClearField("self_test_data")
            self._processor = sentencepiece.SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(model.SerializeToString())
        self.vocab_size = len(model.pieces)
        self.sha256 = hashlib.sha256(raw).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        return flat(self._processor.encode(list(texts), out_type="numpy"))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode(list(ids))
        return text

    def piece(self, id: int) -> bytes:
        piece: str = self._processor.id_to_piece(id)
        return bytes.fromhex(piece[3:5]) if self._processor.is_byte(id) else piece.replace("▁", " ").encode()
