"""Text to ids and back: one port, several backends, control tokens kept apart from text."""

from chatmill.tokenizer.backend import TextColumns, TextTokenizer
from chatmill.tokenizer.factory import MissingTokensError, open_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer
from chatmill.tokenizer.train import train_bpe

__all__ = ["MissingTokensError", "TextColumns", "TextTokenizer", "Tokenizer", "open_tokenizer", "train_bpe"]
