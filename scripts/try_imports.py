"""Try `chatmill import` on the published configs of Axolotl, LLaMA-Factory, TRL and the alignment handbook.

    python scripts/try_imports.py CHECKOUT... [--only TEXT] [--work FOLDER] [--markdown]

CHECKOUT is a checkout of one of the repositories. For every config that `chatmill import` accepts, the script prepares
the data and trains for 5 steps on the CPU. Generated samples of the same shape replace the data, and a tiny model with
random weights replaces the model. Each row has at most 256 tokens, and each step has 8 rows. If the config sets a
validation split, the split contains at least a tenth of the samples.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chatmill.errors import ChatmillError
from chatmill.integrations.configs import ImportedConfig, import_axolotl, import_llamafactory, import_trl, write_import
from chatmill.prepare import LocalEngine, load_recipe, prepare_dataset
from chatmill.train import TrainConfig, train_model

STEPS, ROWS, TOKENS, RECORDS = 5, 8, 256, 60
TEMPLATE = """{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LINE = "{:<75} {:>4} {:>5} {:>7} {:>7}  {}"
KINDS = (
    ("examples/**/*.y*ml", "src/axolotl", import_axolotl),
    ("examples/**/*.y*ml", "src/llamafactory", import_llamafactory),
    ("examples/cli_configs/*.yaml", "trl", import_trl),
    ("recipes/**/*.yaml", "src/alignment", import_trl),
)
"""For each repository: the path of its configs, a folder that identifies it, and the importer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkouts", nargs="+", type=Path, metavar="CHECKOUT", help="folders with checkouts of repositories"
    )
    parser.add_argument("--only", default="", help="try only configs whose path contains this text")
    parser.add_argument("--refused", action="store_true", help="also list the configs that are refused")
    parser.add_argument("--most", type=int, default=10**6, help="train at most this many configs per repository")
    parser.add_argument("--work", type=Path, help="folder for models, data and runs (default: a temporary folder)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = parser.parse_args()
    checkouts = [path.resolve() for path in args.checkouts]
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        model = tiny_model(work)
        trained = tried = refused = 0
        heads = ("config", "keys", "taken", "without", "unknown", "result")
        print("| " + " | ".join(heads) + " |\n" + "|---" * 6 + "|" if args.markdown else LINE.format(*heads))
        for number, (name, path, read) in enumerate(configs(checkouts, args.only, args.most)):
            result, imported = attempt(path, read, model, work / f"run{number}")
            counts = (
                [len(imported.results), *(len(imported.with_status(each)) for each in ("taken", "none", "unknown"))]
                if imported
                else ["", "", "", ""]
            )
            tried, refused = tried + bool(imported), refused + (not imported)
            trained += result.startswith("trained")
            if imported or args.refused:
                line = f"| `{name}` | " + " | ".join(map(str, [*counts, result])) + " |"
                print(line if args.markdown else LINE.format(name, *counts, result), flush=True)
        print(f"\n{tried} configs imported and {trained} trained; {refused} refused")
    return 0


def configs(checkouts: list[Path], only: str, most: int) -> Iterator[tuple[str, Path, Any]]:
    for checkout in checkouts:
        for pattern, mark, read in KINDS:
            if not (checkout / mark).is_dir() or (mark == "trl" and (checkout / "src").exists()):
                continue
            paths = [path for path in sorted(checkout.glob(pattern)) if only in str(path)]
            for path in paths[:most]:
                yield str(path.relative_to(checkout)), path, read


def attempt(path: Path, read: Any, model: Path, folder: Path) -> tuple[str, ImportedConfig | None]:
    """Import a config, prepare its data and train; return the outcome in one line."""
    try:
        imported = read(path, model=str(model))
        write_import(imported, folder)
    except ChatmillError as error:
        return "refused: " + str(error).removeprefix(f"{path}: "), None
    recipe = folder / "recipe.yaml"
    replace_data(recipe, folder)
    steps = int(imported.train.get("gradient_accumulation_steps", 1))
    steps = steps if ROWS % steps == 0 else 1
    changes: dict[str, Any] = {"device": "cpu", "dtype": "float32", "compile": False, "check_memory": False}
    changes |= {"batch_size": ROWS, "gradient_accumulation_steps": steps, "block_size": TOKENS, "parallel": "ddp"}
    changes |= {"max_iters": STEPS, "epochs": None, "report_to": [], "eval_samples": 0, "fp8": False}
    if (lora := imported.train.get("lora")) and not TARGETS.intersection(lora["targets"]):
        # Replace LoRA targets that the tiny model does not have.
        changes["lora"] = {**lora, "targets": "all-linear"}
    stage = "prepare"
    try:
        prepare_dataset(load_recipe(recipe), folder / "data", engine=LocalEngine(1))
        stage = "train"
        config = TrainConfig.from_file(folder / "train.json", **changes)
        steps = train_model(config, model_name=folder.name, quiet=True).step
    except ChatmillError as error:
        return f"{stage} failed: {error}", imported
    return f"trained {steps} steps" if steps == STEPS else f"stopped after {steps} steps", imported


# Functions that create a tiny model and samples, to replace the model and the data of a config.


def tiny_model(work: Path) -> Path:
    """Write a model of two layers with random weights, a tokenizer, and a chat template."""
    folder = work / "tiny-model"
    if folder.exists():
        return folder
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from chatmill.tokenizer import train_bpe

    marks = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    texts = [json.dumps(record("messages", number)) for number in range(200)]
    parsed = Tokenizer.from_str(train_bpe(texts, vocab_size=600, control=marks).decode())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=parsed, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=1 << 20, **sizes)
    config.eos_token_id = tokenizer.eos_token_id
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def replace_data(recipe: Path, folder: Path) -> None:
    """Generate samples for each source of a recipe, and change the recipe to read the samples."""
    import yaml

    values = yaml.safe_load(recipe.read_text())
    for number, source in enumerate(values["sources"]):
        shape = source.get("shape") or ("text" if values.get("format") == "text" else "messages")
        path = folder / f"sample{number}.jsonl"
        records = [
            renamed(record(shape, 1000 * number + each), shape, source.get("columns")) for each in range(RECORDS)
        ]
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        source["inputs"] = [str(path)]
    # Limit rows to the block size of the tiny model.
    values["max_tokens"] = min(values.get("max_tokens", TOKENS), TOKENS)
    if values.get("val_split"):
        values["val_split"] = max(0.1, values["val_split"])
    if (values.get("filters") or {}).get("min_tokens"):
        values["filters"]["min_tokens"] = 2
    recipe.write_text(yaml.safe_dump(values))


def record(shape: str, number: int) -> dict[str, Any]:
    """Return a record of this shape, with questions about addition."""
    question, answer = f"What is {number} plus {number + 3}?", f"It is {2 * number + 3}."
    more, last = f"And plus {number % 7}?", f"Then it is {2 * number + 3 + number % 7}."
    turns = [("user", question), ("assistant", answer), ("user", more), ("assistant", last)]
    if shape == "alpaca":
        return {"instruction": question, "input": "", "output": answer}
    if shape == "text":
        return {"text": " ".join(text for _, text in turns)}
    if shape == "prompt-completion":
        return {"prompt": question, "completion": answer}
    if shape == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": names[role], "value": text} for role, text in turns]}
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def renamed(record: dict[str, Any], shape: str, columns: dict[str, Any] | None) -> dict[str, Any]:
    """Return the record with the column names that the recipe expects."""
    names = {ours: theirs[0] if isinstance(theirs, list) else theirs for ours, theirs in (columns or {}).items()}

    def message(turn: dict[str, Any]) -> dict[str, Any]:
        return {
            names.get(key, key): names.get(value, value) if key in ("role", "from") else value
            for key, value in turn.items()
        }

    return {
        names.get(key, key): [message(turn) for turn in value] if isinstance(value, list) else value
        for key, value in record.items()
    }


if __name__ == "__main__":
    sys.exit(main())
