"""Tokenizers, which convert text to ids and back. Text never becomes a control token.

`open_tokenizer` opens a `Tokenizer`, which is a vocabulary with the control tokens of a format. `MissingTokensError` is
raised if the vocabulary lacks control tokens of the format. `TextTokenizer` is the tokenizer protocol that the public
API accepts. `TextColumns` stores many texts in one byte buffer. `train_bpe` trains a byte-level BPE tokenizer.
"""

from chatmill.tokenizer.backend import TextColumns, TextTokenizer
from chatmill.tokenizer.factory import MissingTokensError, open_tokenizer
from chatmill.tokenizer.tokenizer import Tokenizer
from chatmill.tokenizer.train import train_bpe

__all__ = ["MissingTokensError", "TextColumns", "TextTokenizer", "Tokenizer", "open_tokenizer", "train_bpe"]
