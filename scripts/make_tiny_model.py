"""Create a folder with a tiny Qwen3 model, so that tutorials run without a download.

    python scripts/make_tiny_model.py my-model                      a vocabulary of 1,000 tokens, 2 layers
    python scripts/make_tiny_model.py my-model --data mine.jsonl    with a tokenizer trained on your conversations
    python scripts/make_tiny_model.py my-model --hidden-size 128 --layers 4 --seed 1

The folder has the same files as a downloaded model. transformers, PEFT, TRL and chatmill can load it:

    config.json, model.safetensors     Qwen3 with random weights, in bfloat16
    generation_config.json             the tokens at which generation stops
    tokenizer.json                     a byte-level BPE tokenizer, trained on the texts of --data
    tokenizer_config.json              its special tokens
    chat_template.jinja                ChatML with tools, tool calls and reasoning

Equal arguments and library versions produce equal bytes. The weights are random, so the answers are random too: use the
model only to try out commands. The script fails if the folder exists and is not empty.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import warnings
from itertools import chain
from pathlib import Path

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.format import record_texts
from chatmill.records import read_records
from chatmill.tokenizer import train_bpe
from chatmill.train.model_files import match_modes

CONVERSATIONS = Path(__file__).resolve().parents[1] / "data" / "conversations.jsonl"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Added tokens that are not special and are decoded as text, as in Qwen3."""
LARGEST_VOCABULARY = 2**20
HEAD_DIM = 16
TEMPLATE = """\
{#- ChatML. Tool definitions are part of the system turn; tool results are user turns; reasoning is written only after
    the last user message. -#}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
  {{- 'Functions you can call:\\n' -}}
  {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
  {{- 'Call a function with <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif not (tools and loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.reasoning_content and loop.index0 > last.user -%}
      {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
      {{- (function.arguments if function.arguments is string else function.arguments | tojson) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write the model to")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[str(CONVERSATIONS)],
        metavar="FILE",
        help="conversations in any shape that chatmill reads (default: data/conversations.jsonl)",
    )
    parser.add_argument("--vocab-size", type=int, default=1000, help="vocabulary size (default: %(default)s)")
    parser.add_argument(
        "--hidden-size", type=int, default=64, help=f"hidden size, a multiple of {2 * HEAD_DIM} (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=2, help="number of transformer layers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed for the random weights (default: %(default)s)")
    args = parser.parse_args()
    try:
        make_model(
            args.folder,
            args.data,
            vocab_size=args.vocab_size,
            hidden_size=args.hidden_size,
            layers=args.layers,
            seed=args.seed,
        )
    except ChatmillError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{parser.prog}: {args.folder}: {error.strerror or error}; use a writable folder", file=sys.stderr)
        return 1
    return 0


def make_model(
    folder: Path, data: list[str], *, vocab_size: int = 1000, hidden_size: int = 64, layers: int = 2, seed: int = 0
) -> None:
    """Write the model folder atomically."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder}: already exists; remove it or use a new name")
    smallest = 256 + len(SPECIAL_TOKENS) + len(TEXT_TOKENS)
    if not smallest <= vocab_size <= LARGEST_VOCABULARY:
        raise UsageError(f"--vocab-size is {vocab_size}; expected {smallest} to {LARGEST_VOCABULARY}")
    if hidden_size < 2 * HEAD_DIM or hidden_size % (2 * HEAD_DIM):
        raise UsageError(f"--hidden-size is {hidden_size}; expected a multiple of {2 * HEAD_DIM}")
    if layers < 1:
        raise UsageError(f"--layers is {layers}; expected at least 1")
    if seed < 0:
        raise UsageError(f"--seed is {seed}; expected 0 or more")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.{os.getpid()}.part"
    aside.mkdir()
    try:
        texts = chain.from_iterable(map(record_texts, read_records(data)))
        learned = train_bpe(texts, vocab_size=vocab_size - len(TEXT_TOKENS), control=SPECIAL_TOKENS)
        tokens = write_tokenizer(aside, learned.decode())
        parameters = write_weights(aside, vocab_size=tokens, hidden_size=hidden_size, layers=layers, seed=seed)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    print(f"{folder}: Qwen3 with {parameters:,} random weights, {tokens:,} tokens")


def write_tokenizer(folder: Path, learned: str) -> int:
    """Write the tokenizer files and the chat template; return the size of the vocabulary."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_str(learned)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32768
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def write_weights(folder: Path, *, vocab_size: int, hidden_size: int, layers: int, seed: int) -> int:
    """Write the config, the generation config and the weights; return the number of weights."""
    import numpy as np
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    end_of_text, _, end_of_turn = range(len(SPECIAL_TOKENS))
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // (2 * HEAD_DIM),
        head_dim=HEAD_DIM,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )
    with torch.random.fork_rng():
        model = Qwen3ForCausalLM(config)
    # numpy's uniform random numbers are identical on every processor, unlike torch's normal random numbers. The
    # variance of each matrix is 1 / (number of columns): if the tied embeddings were smaller, the loss could not get
    # close to 0.
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() == 2:
                width = (12 / weight.shape[1]) ** 0.5
                weight.copy_(
                    torch.from_numpy((random.random(weight.shape, dtype=np.float32) - 0.5) * np.float32(width))
                )
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text
    )
    model.save_pretrained(folder)
    match_modes(folder)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    # Hide warnings that do not concern the model.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
