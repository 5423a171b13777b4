"""Train a byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chatmill.errors import DataError, UsageError


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, control: Sequence[str], progress: Callable[[int], None] | None = None
) -> bytes:
    """Train a byte-level BPE tokenizer on texts and return the bytes of its tokenizer.json.

    The lowest ids are the control tokens, followed by the 256 bytes and the merged tokens. Encoding and then decoding a
    text returns the same text. The same texts in the same order produce the same file. The vocabulary is smaller than
    `vocab_size` if the texts contain too few pairs of tokens to merge. `progress` is called with the number of texts
    read so far.
    """
    tokens = list(dict.fromkeys(control))
    least = 256 + len(tokens)
    if vocab_size < least:
        what = f"256 bytes and {len(tokens)} control tokens"
        raise UsageError(f"--vocab-size {vocab_size} is too small for {what}; expected at least {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_checked(texts, progress), trainer)
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def _checked(texts: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"text {number} contains a lone surrogate at character {error.start}"
            raise DataError(f"{what}; expected valid Unicode") from error
        yield text
        if progress:
            progress(number)
