from __future__ import annotations

import json
import warnings
from pathlib import Path

from tokenizers import Tokenizer

from chatmill.tokenizer import train_bpe

TEMPLATE = """{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def conversations(count: int) -> list[list[tuple[str, str]]]:
    return [
        [
            ("user", f"What is {number} plus {number + 3}?"),
            ("assistant", f"It is {2 * number + 3}."),
            ("user", "And one more?"),
            ("assistant", f"Then it is {2 * number + 4}."),
        ]
        for number in range(count)
    ]


def write_messages(path: Path, count: int = 40) -> None:
    records = [
        {"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_alpaca(path: Path, count: int = 40) -> None:
    records = [{"instruction": turns[0][1], "input": "", "output": turns[1][1]} for turns in conversations(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def save_tokenizer(folder: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast
    texts = [text for turns in conversations(40) for _, text in turns]
    backend = Tokenizer.from_str(train_bpe(texts, vocab_size=330, control=["<|im_start|>", "<|im_end|>"]).decode())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_tiny_model(folder: Path) -> Path:
    vocab_size = save_tokenizer(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=vocab_size, num_attention_heads=2, num_key_value_heads=1, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def leaves(value: object, path: str = "") -> list[str]:
    """Return the paths of all values in a config, such as `datasets[0].type`. A list of plain values is
    treated as a single value.
    """
    if isinstance(value, dict) and value:
        return [leaf for name, each in value.items() for leaf in leaves(each, f"{path}.{name}" if path else str(name))]
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [leaf for number, each in enumerate(value) for leaf in leaves(each, f"{path}[{number}]")]
    # An empty table in a list has no keys, so nothing is reported for it.
    return [] if value == {} and path.endswith("]") else [path]


def unreported(config: object, keys: list[str]) -> list[str]:
    """Return the paths of values that are not reported under exactly one key.

    A reported key includes all values nested under the key.
    """

    def names(key: str, leaf: str) -> bool:
        return leaf == key or leaf.startswith((f"{key}.", f"{key}["))

    return [leaf for leaf in leaves(config) if sum(names(key, leaf) for key in keys) != 1]
