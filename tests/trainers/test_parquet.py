from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
import trl
from chat_datasets import chats, rows_of, write_rows
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from chatmill.store.parquet import export_parquet
from chatmill.store.read import open_dataset

COLUMNS = ["input_ids", "labels", "position_ids", "seq_lengths"]


def expected(rows) -> list[dict]:
    found = []
    for row in (rows[at : at + 1] for at in range(len(rows))):
        lengths = [n for n in np.diff(row.segment_start).tolist() if n]
        positions = [position for length in lengths for position in range(length)]
        labels = [
            int(target) if weight > 0 and position else -100
            for target, weight, position in zip(row.targets(), row.weights(), positions, strict=True)
        ]
        columns = (row.ids.tolist(), labels, positions, lengths)
        found.append(dict(zip(COLUMNS, columns, strict=True)))
    return found


STEPS, BATCH, RATE = 10, 3, 1e-2


def tiny_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=512, max_position_embeddings=512, attn_implementation="sdpa", **sizes)
    )


def losses_in_trl(dataset, folder, *, padding_free: bool, skip: bool) -> list[float]:
    # The trainer requires a tokenizer, but uses only its padding id.
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    trainer = trl.SFTTrainer(
        tiny_model(),
        args=trl.SFTConfig(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_grad_norm=0.0,
            max_length=None,
            padding_free=padding_free,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": skip},
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_one_by_one(episodes) -> list[float]:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        rows = episodes.rows(np.arange(step * BATCH, (step + 1) * BATCH))
        total, count = torch.zeros(()), 0
        for start, stop in zip(rows.segment_start[:-1], rows.segment_start[1:], strict=True):
            ids, mask = (values[None, start:stop] for values in (rows.ids.astype(np.int64), rows.mask()))
            x, trained = ids[:, :-1], mask[:, 1:]
            y = np.where(trained, ids[:, 1:], -100)
            logits = model(input_ids=torch.from_numpy(x)).logits
            total = total + torch.nn.functional.cross_entropy(logits[0], torch.from_numpy(y[0]), reduction="sum")
            count += int(trained.sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses


def adapted(episodes):
    def stream():
        for rows in episodes.sweep(tokens=500):
            yield from expected(rows)

    return datasets.IterableDataset.from_generator(stream)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pack", [None, 300])
def test_trl_trains_on_it_with_the_loss_of_the_dataset(tmp_path, pack):
    rows = rows_of(chats(0, 90), pack=pack)
    write_rows(tmp_path / "v1", {"train": rows}, shard_tokens=2000)
    export_parquet(tmp_path / "v1", tmp_path / "out")
    exported = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert [exported[at] for at in range(len(exported))] == expected(rows)

    episodes = open_dataset(tmp_path / "v1")["train"]
    packed = pack is not None
    of_export = losses_in_trl(exported, tmp_path / "trl", padding_free=packed, skip=False)
    of_adapter = losses_in_trl(adapted(episodes), tmp_path / "trl", padding_free=packed, skip=True)
    assert of_adapter == of_export
    alone = losses_one_by_one(episodes)
    assert of_export == pytest.approx(alone, rel=1e-5)
    if packed:
        # Without padding_free, TRL lets the conversations of a row attend to each other.
        mingled = losses_in_trl(exported, tmp_path / "trl", padding_free=False, skip=False)
        assert mingled != pytest.approx(alone, rel=1e-5)
    assert len(of_export) == STEPS
    assert of_export[-1] < of_export[0] - 0.5
