"""The configuration of a stage-2 run: whose answers, to what, and how the rows that come of them are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chatmill.config import Config, Right, flag, key, number, one_of, optional, text, whole
from chatmill.rollout.match import GATE

SHARE = Right("a share from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1)
BETA = Right("a number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Config):
    """All that decides what a stage-2 run computes and what it writes."""

    # The task.
    truth: str | None = key(None, "a .jsonl of records: id, messages, objects", optional(text()))
    init_from_model: str | None = key(None, "the model of stage 1: its folder, or that of its run", optional(text()))
    tokenizer: str = key("bytes", "the tokenizer that the model was trained with", text())
    format: str = key("chatml", "the format that the model was trained with", text())
    add_tokens: bool = key(False, "add the control tokens and coordinates that the tokenizer lacks", flag())
    fields: Sequence[str] | None = key(
        None, "the fields of entries; null: desc and boxes", optional(Right("a list of names", _are_names))
    )
    gate: float = key(GATE, "boxes that overlap less are not matched", SHARE)
    train_values: bool = key(True, "train the texts of appended entries too", flag())
    train_cut: bool = key(False, "train the shorter token where the cut goes through one", flag())

    # Whose answers.
    rollout_every: int = key(1, "steps that are trained on what was generated at once", whole(1))
    max_new_tokens: int = key(512, "tokens of an answer, at most", whole(1))
    decoding: str = key("greedy", "how answers are decoded", one_of("greedy", "sample", "beam"))
    temperature: float = key(1.0, "of sample", number(0))
    top_k: int = key(0, "of sample: draw from so many tokens; 0: from all", whole(0))
    top_p: float = key(1.0, "of sample: draw from tokens with so much probability", SHARE)
    beams: int = key(4, "of beam: how many; the best answer is taken", whole(1))
    generate_batch_size: int = key(64, "prompts that are answered at a time", whole(1))
    server: str | None = key(
        None, "a server that answers instead, with the weights it has: http://…/v1", optional(text())
    )
    server_model: str | None = key(None, "what the server calls the model", optional(text()))
    replay: str | None = key(None, "answers from the log of an earlier run, instead of a model's", optional(text()))

    # The loss.
    text_weight: float = key(1.0, "of cross entropy on text", number(0))
    soft_weight: float = key(1.0, "of cross entropy toward the Gaussian, on coordinates", number(0))
    wasserstein_weight: float = key(1.0, "of the distance to the Gaussian, on coordinates", number(0))
    outside_weight: float = key(1.0, "of probability outside of coordinates, on coordinates", number(0))
    sigma: float = key(
        2.0, "how wide the Gaussian is", Right("a number over 0", lambda value: number(0).fits(value) and value > 0)
    )

    # The optimizer and its schedule.
    max_iters: int = key(1000, "optimizer steps", whole(1))
    batch_size: int = key(16, "rollouts of one step", whole(1))
    gradient_accumulation_steps: int = key(1, "parts in which they are computed", whole(1))
    learning_rate: float = key(1e-4, "the highest learning rate", number(0))
    min_lr_ratio: float = key(0.1, "the share of it that the schedule falls to", SHARE)
    lr_schedule: str = key("cosine", "how it falls", one_of("cosine", "linear", "constant"))
    warmup_iters: int = key(0, "steps in which it rises", whole(0))
    weight_decay: float = key(0.1, "decay of matrices; vectors have none", number(0))
    beta1: float = key(0.9, "AdamW's memory of gradients", BETA)
    beta2: float = key(0.95, "AdamW's memory of their squares", BETA)
    adam_eps: float = key(1e-8, "what keeps AdamW from dividing by zero", number(0))
    grad_clip: float = key(1.0, "the longest gradient; 0: of any length", number(0))
    seed: int = key(1337, "of the order of prompts and of what is drawn", whole(0, 2**31))

    # Where, and what is written.
    device: str = key("auto", "where; auto: on a GPU if there is one", one_of("auto", "cpu", "cuda"))
    dtype: str = key("auto", "precision of the computation", one_of("auto", "float32", "bfloat16"))
    save_interval: int = key(500, "steps between checkpoints, and one at the end; 0: none", whole(0))
    keep_checkpoints: int = key(2, "how many of the last checkpoints stay", whole(1))
    log_interval: int = key(10, "steps between lines of progress where no terminal shows a bar", whole(1))

    def conflicts(self) -> Iterator[str]:
        for name in ("truth", "init_from_model"):
            if getattr(self, name) is None:
                yield f"{name} is not given; a run needs it"
        if self.gate == 0:
            yield "gate is 0; expected a number over 0, up to 1"
        if self.save_interval % self.rollout_every:
            # Between two rounds there is nothing but the model and its optimizer to remember.
            yield f"save_interval {self.save_interval} is no multiple of rollout_every {self.rollout_every}"
        if self.server is not None and self.server_model is None:
            yield "server is given and server_model is not"
        if self.server is not None and self.replay is not None:
            yield "server and replay are given; expected one of them"
        if self.server is not None and (self.decoding == "beam" or self.top_k):
            yield "a server decodes greedily or by temperature and top_p; leave out beams and top_k"
