from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from model_fixtures import small_gpt

from chatmill.errors import DataError
from chatmill.train import GPT, GPTSizes
from chatmill.train.generation import Sampling, beam_search, choose, generate, generate_steps, prefill
from chatmill.train.model import CausalModel

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 1]]
END = 0


@pytest.fixture(scope="module")
def model() -> GPT:
    return small_gpt(GPTSizes(vocab_size=8, n_layer=2, n_embd=32, n_head=4, n_kv_head=2, max_positions=24))


def logprobs(model: GPT, ids: list[int]) -> torch.Tensor:
    x = torch.tensor([ids])
    with torch.no_grad():
        logits = model.logits(x, torch.arange(len(ids))[None], torch.zeros_like(x))
    return logits[0].double().log_softmax(dim=1)


def greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count and END not in ids:
        ids.append(int(logprobs(model, prompt + ids)[-1].argmax()))
    return ids


def test_greedy_answers_equal_those_without_a_cache(model):
    answers = generate(model, PROMPTS, max_tokens=12, end_ids=[END])
    assert answers == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) > 1


def test_logits_with_the_cache_equal_those_without(model):
    forced = torch.randint(1, 8, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, cache = prefill(model, PROMPTS, room=9)
        for at in range(9):
            wanted = [logprobs(model, prompt + forced[row, :at].tolist())[-1] for row, prompt in enumerate(PROMPTS)]
            assert torch.allclose(logits.double().log_softmax(dim=1), torch.stack(wanted), atol=1e-4)
            logits = model.step(forced[:, at], cache)


def test_an_answer_stops_at_any_end_token_and_includes_it(model):
    free = generate(model, PROMPTS, max_tokens=8, end_ids=[])
    ends = [free[0][2], 7]
    stopped = generate(model, PROMPTS, max_tokens=8, end_ids=ends)
    for answer, whole in zip(stopped, free, strict=True):
        cut = next((at + 1 for at, token in enumerate(whole) if token in ends), 8)
        assert answer == whole[:cut]


def test_an_answer_stops_at_the_maximum_sequence_length(model):
    for most in (50, 10**12):
        lengths = [len(answer) for answer in generate(model, [[1] * 20, [2]], max_tokens=most, end_ids=[])]
        assert lengths == [4, 23]


def test_generate_steps_yields_one_token_per_unfinished_row(model):
    steps = list(generate_steps(model, PROMPTS, max_tokens=6, end_ids=[END], sampling=Sampling()))
    answers = generate(model, PROMPTS, max_tokens=6, end_ids=[END])
    rebuilt = [[step[row] for step in steps if row in step] for row in range(3)]
    assert rebuilt == answers


HOT = Sampling(temperature=1.0, seed=5)


def test_a_sampled_answer_depends_on_its_key_and_not_on_the_batch(model):
    together = generate(model, PROMPTS, max_tokens=10, end_ids=[END], sampling=HOT)
    apart = [
        generate(model, [prompt], max_tokens=10, end_ids=[END], sampling=HOT, first_row=row)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == apart == generate(model, PROMPTS, max_tokens=10, end_ids=[END], sampling=HOT, batch_size=2)


@pytest.mark.parametrize("other", [{"seed": 6}, {"step": 1}, {"first_row": 1}])
def test_a_different_seed_step_or_row_gives_a_different_draw(model, other):
    key = {"seed": 5, "step": 0, "first_row": 0} | other
    answers = [
        generate(
            model,
            [[1, 2]],
            max_tokens=20,
            end_ids=[],
            sampling=Sampling(temperature=2.0, seed=k["seed"], step=k["step"]),
            first_row=k["first_row"],
        )
        for k in ({"seed": 5, "step": 0, "first_row": 0}, key)
    ]
    assert answers[0] != answers[1]


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[0.1, 2.0, -1.0, 0.7]])
    draws = (np.arange(20_000) + 0.5) / 20_000
    tokens = choose(logits.expand(20_000, -1), Sampling(temperature=0.5), draws)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert torch.allclose(shares, (logits[0] / 0.5).softmax(dim=0), atol=1e-3)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.6), {1}),
        (Sampling(temperature=1.0, top_p=0.75), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.0), {1}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.99), {0, 1, 3}),
        (Sampling(), {1}),
    ],
)
def test_top_k_and_top_p_exclude_unlikely_tokens(sampling, kept):
    logits = torch.tensor([[0.1, 0.6, 0.05, 0.25]]).log().expand(1001, -1)
    draws = np.append(np.linspace(0, 1, 1000, endpoint=False), np.nextafter(1, 0))
    assert set(choose(logits, sampling, draws).tolist()) == kept


@pytest.mark.parametrize("temperature", [1e-9, 1e-320])
def test_tiny_temperatures_choose_the_most_likely_token(temperature):
    logits = torch.tensor([[0.1, 2.0, -1.0, 0.7], [-3.0, -2.0, -1.0, -0.5]]).repeat(50, 1)
    draws = np.linspace(0, 1, 100, endpoint=False)
    assert choose(logits, Sampling(temperature=temperature), draws).tolist() == [1, 3] * 50


@pytest.fixture(scope="module")
def every_answer(model: GPT) -> list[dict[tuple[int, ...], float]]:
    found = []
    for prompt in PROMPTS:
        answers = torch.tensor(list(product(range(8), repeat=3)))
        x = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], dim=1)
        with torch.no_grad():
            logits = model.logits(x, torch.arange(x.shape[1]).expand_as(x), torch.zeros_like(x))
        known = logits.double().log_softmax(dim=2)[:, len(prompt) - 1 : -1].gather(2, answers[:, :, None])
        scores = {}
        for ids, parts in zip(answers.tolist(), known.squeeze(2).tolist(), strict=True):
            length = ids.index(END) + 1 if END in ids else 3
            scores[tuple(ids[:length])] = sum(parts[:length])
        found.append(scores)
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beam_search_with_enough_beams_finds_the_best_answer(model, every_answer, penalty):
    best = [
        list(max(scores, key=lambda ids, scores=scores: scores[ids] / len(ids) ** penalty)) for scores in every_answer
    ]
    found = beam_search(model, PROMPTS, beams=64, max_tokens=3, end_ids=[END], length_penalty=penalty)
    assert found == best


class Markov(CausalModel):
    vocab_size, max_positions = 2, 100

    def __init__(self, table: list[list[float]]) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table).log())

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, room: int) -> tuple[torch.Tensor, Markov]:
        return self.table[ids[torch.arange(len(ids)), lengths - 1]], self

    def step(self, tokens: torch.Tensor, cache: object) -> torch.Tensor:
        return self.table[tokens]

    def take(self, rows: torch.Tensor) -> None:
        """Do nothing, because this model caches no state."""


# Ending at the first token is likely (0.9). An answer that continues after the first token almost never ends.
LATE = [[0.9, 0.1], [1e-6, 1 - 1e-6]]
# Ending at the second token is more likely (0.7 · 0.99) than at the first (0.3).
SECOND = [[0.3, 0.7], [0.99, 0.01]]


@pytest.mark.parametrize(
    ("table", "penalty", "best"),
    [(LATE, 0.0, [END]), (LATE, 1.0, [1] * 50), (SECOND, 0.0, [1, END]), (SECOND, -1.0, [1, END])],
)
def test_beam_search_continues_while_a_better_answer_is_possible(table, penalty, best):
    found = beam_search(Markov(table), [[END]], beams=2, max_tokens=50, end_ids=[END], length_penalty=penalty)
    assert found == [best]


def test_beam_search_with_one_beam_is_greedy_decoding(model):
    answers = beam_search(model, PROMPTS, beams=1, max_tokens=9, end_ids=[], batch_size=2)
    assert answers == generate(model, PROMPTS, max_tokens=9, end_ids=[])


def test_beam_search_in_a_batch_equals_single_prompts(model):
    together = beam_search(model, PROMPTS, beams=3, max_tokens=7, end_ids=[END])
    assert together == [beam_search(model, [prompt], beams=3, max_tokens=7, end_ids=[END])[0] for prompt in PROMPTS]


def test_prompts_without_room_for_an_answer_are_a_one_line_error(model):
    with pytest.raises(DataError, match="prompt 1 has 24 tokens; the prompt and its answer can have at most 24"):
        generate(model, [[1], [2] * 24], max_tokens=3, end_ids=[])
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate(model, [[1], []], max_tokens=3, end_ids=[])


def test_training_continues_after_generation(model):
    model.train()
    generate(model, PROMPTS, max_tokens=2, end_ids=[])
    assert model.training


def test_generation_does_not_use_layers_compiled_for_training():
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Layer(torch.nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h + 1

    class Compiled(Markov):
        def step(self, tokens: torch.Tensor, cache: object) -> torch.Tensor:
            return self.layer(super().step(tokens, cache))

    model = Compiled(SECOND)
    model.layer = Layer()
    model.layer.compile(backend=compiler, dynamic=False)
    generate(model, [[0], [1]], max_tokens=5, end_ids=[])
    assert graphs == []
    model.layer(torch.ones(3))
    assert len(graphs) == 1
