"""Who answers in a stage-2 run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatmill.rollout.config import RolloutConfig
from chatmill.rollout.files import RolloutReplay
from chatmill.rollout.generate import CompletionServer, Generator
from chatmill.train.beam_search import beam_search
from chatmill.train.generate import Sampling, generate
from chatmill.train.model import CausalModel


def generator_of(config: RolloutConfig, model: CausalModel, end_id: int) -> Generator:
    """Who answers in a run: a log, a server, or the model."""
    if config.replay is not None:
        return RolloutReplay(config.replay)
    if config.server is None:
        return ModelGenerator(model, config, end_id)
    return CompletionServer(
        config.server,
        config.server_model or "",
        config.max_new_tokens,
        end_ids=(end_id,),
        temperature=config.temperature if config.decoding == "sample" else 0.0,
        top_p=config.top_p,
        seed=config.seed,
    )


class ModelGenerator:
    """Answers of the model that is being trained, as it is at that moment."""

    def __init__(self, model: CausalModel, config: RolloutConfig, end_id: int) -> None:
        self._model, self._config, self._end_ids = model, config, (end_id,)

    def __call__(self, prompts: Sequence[Sequence[int]], *, step: int, first_row: int = 0) -> list[list[int]]:
        config = self._config
        limits: dict[str, Any] = {"max_tokens": config.max_new_tokens, "end_ids": self._end_ids}
        if config.decoding == "beam":
            size = max(1, config.generate_batch_size // config.beams)
            return beam_search(self._model, prompts, beams=config.beams, batch_size=size, **limits)
        temperature = config.temperature if config.decoding == "sample" else 0.0
        return generate(
            self._model,
            prompts,
            sampling=Sampling(temperature, config.top_k, config.top_p, config.seed, step),
            first_row=first_row,
            batch_size=config.generate_batch_size,
            **limits,
        )
