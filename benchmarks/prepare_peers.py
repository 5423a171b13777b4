"""The peers of `benchmarks/prepare.py`, each run in a separate process.

`trl` runs TRL's own dataset preparation. `trl-batched` is the fastest documented variant: a batched `datasets.map`
tokenizes the conversations, and TRL only packs them. `datatrove` only tokenizes text that was rendered beforehand; it
does not compute a mask or pack rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from corpus import Data
from render import CHATML, template_file

PACK = 4096


def trl_side(data: Data, template: str | None, folder: Path, processes: int) -> dict[str, Any]:
    began = time.perf_counter()
    trl, datasets, peer = _trl(data, template, folder)
    config = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=PACK,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=processes,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    # `_prepare_dataset` needs only these attributes of the trainer, and no model.
    trainer: Any = SimpleNamespace(chat_template=peer.chat_template, completion_only_loss=False, _tokenizer=peer)
    os.sync()
    started = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(data.path), split="train", cache_dir=str(folder / "cache"))
    packed = trl.SFTTrainer._prepare_dataset(trainer, loaded, peer, config, True, None, "train")
    taken = time.perf_counter() - started
    return _packed(packed, folder / "trl.hashes", masks=template is None) | {
        "seconds": taken,
        "start_up": started - began,
    }


def trl_batched_side(data: Data, template: str | None, folder: Path, processes: int) -> dict[str, Any]:
    """Tokenize in batches with `datasets.map`, then pack with TRL."""
    began = time.perf_counter()
    trl, datasets, peer = _trl(data, template, folder)

    def tokenized(batch: Any) -> dict[str, list[list[int]]]:
        rows = peer.apply_chat_template(batch["messages"], return_dict=True, return_assistant_tokens_mask=True)
        return {name: [row[:PACK] for row in rows[name]] for name in ("input_ids", "assistant_masks")}

    os.sync()
    started = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(data.path), split="train", cache_dir=str(folder / "cache"))
    rows = loaded.map(tokenized, batched=True, num_proc=processes, remove_columns=loaded.column_names)
    packed = trl.pack_dataset(rows, PACK, "bfd", {"num_proc": processes})
    taken = time.perf_counter() - started
    return _packed(packed, folder / "trl-batched.hashes", masks=template is None) | {
        "seconds": taken,
        "start_up": started - began,
    }


def datatrove_side(data: Data, template: str | None, folder: Path, processes: int) -> dict[str, Any]:
    """Tokenize ChatML text with datatrove. The text is written to `processes` files before the timer starts."""
    began = time.perf_counter()
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from tokenizers import Tokenizer

    texts, tokens = folder / "texts", folder / "tokens"
    texts.mkdir()
    token_bytes = 4 if Tokenizer.from_file(str(data.tokenizer)).get_vocab_size() > 1 << 16 else 2
    files = [(texts / f"{number}.jsonl").open("w", encoding="utf-8") for number in range(processes)]
    with data.path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            turns = [
                f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in json.loads(line)["messages"]
            ]
            files[number % processes].write(json.dumps({"text": "".join(turns)}) + "\n")
    for file in files:
        file.close()
    steps = [JsonlReader(str(texts)), DocumentTokenizer(str(tokens), str(data.tokenizer), shuffle_documents=False)]
    os.sync()
    started = time.perf_counter()
    LocalPipelineExecutor(steps, tasks=processes, workers=processes, logging_dir=str(folder / "logs")).run()
    taken = time.perf_counter() - started

    def conversations() -> Iterator[tuple[Any, Any]]:
        for path in sorted(tokens.glob("*.ds")):
            ids = np.memmap(path, dtype=f"<u{token_bytes}", mode="r")
            stops = np.fromfile(f"{path}.index", dtype=np.uint64).tolist()
            for start, stop in zip([0, *stops], stops, strict=False):
                yield ids[start:stop], None

    hashes, count = hashed(conversations(), masks=False)
    (folder / "datatrove.hashes").write_text("\n".join(hashes))
    return {"seconds": taken, "start_up": started - began, "tokens": count}


PEERS = {"trl": trl_side, "trl-batched": trl_batched_side, "datatrove": datatrove_side}


def _trl(data: Data, template: str | None, folder: Path) -> tuple[Any, Any, Any]:
    os.environ["HF_HOME"] = str(folder / "hf")
    import datasets
    import trl
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    peer = PreTrainedTokenizerFast(tokenizer_file=str(data.tokenizer), eos_token="<|im_end|>", pad_token="<|im_end|>")
    peer.chat_template = CHATML if template is None else template_file(f"{template}_training").read_text("utf-8")
    return trl, datasets, peer


def _packed(packed: Any, path: Path, *, masks: bool) -> dict[str, Any]:
    columns = packed.with_format("numpy")
    mask = next(name for name in ("assistant_masks", "labels") if name in packed.column_names)

    def conversations() -> Iterator[tuple[Any, Any]]:
        for row in columns:
            trained = row[mask] != (-100 if mask == "labels" else 0)
            ends = np.cumsum(row["seq_lengths"])
            for start, stop in zip(ends - row["seq_lengths"], ends, strict=True):
                yield row["input_ids"][start:stop], trained[start:stop]

    hashes, tokens = hashed(conversations(), masks=masks)
    path.write_text("\n".join(hashes))
    return {"tokens": tokens, "rows": len(packed)}


def hashed(conversations: Iterable[tuple[Any, Any]], *, masks: bool) -> tuple[list[str], int]:
    """Return one line (length and hash) per conversation, and the total number of tokens."""
    found, tokens = [], 0
    for ids, trained in conversations:
        digest = blake2b(np.asarray(ids, dtype=np.uint32).tobytes(), digest_size=12)
        if masks:
            digest.update(np.asarray(trained, dtype=bool).tobytes())
        found.append(f"{len(ids)} {digest.hexdigest()}")
        tokens += len(ids)
    return found, tokens
