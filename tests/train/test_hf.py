from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import VOCAB, conversation, gradients, inputs, packed, plain_loss
from safetensors.torch import load_file, save_file

from chatmill.errors import DataError
from chatmill.train.generation import Sampling, beam_search, generate, prefill
from chatmill.train.hf import HFModel
from chatmill.train.load_model import open_model
from chatmill.train.loss import LMHead

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoConfig, AutoModelForCausalLM

CHATS = [conversation(length, seed=length) for length in (5, 9, 3, 7)]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 1, 2, 3, 1]]
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen3": COMMON | {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": COMMON | {"sliding_window": 3},
    "gemma2": COMMON | {"head_dim": 8, "sliding_window": 3, "final_logit_softcapping": 2.0},
    # Scaled logits.
    "granite": COMMON | {"logits_scaling": 4.0},
    "cohere": COMMON | {"logit_scale": 0.25},
    "gpt2": GPT2,
    "phi": COMMON,
    # Experts.
    "mixtral": COMMON | {"num_local_experts": 2},
    # These architectures use ALiBi or a recurrent state, so they do not separate conversations.
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    # Conversations are not separated here either: OPTForCausalLM calls the decoder inside OPTModel without calling
    # OPTModel.
    "opt": COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
APART = {"bloom", "mamba", "opt"}


def fresh(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name], **changes))
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            elif name == "phi":
                parameter.add_(torch.randn_like(parameter) / 4)
    return lm


@pytest.fixture(params=ARCHITECTURES)
def model(request) -> HFModel:
    return HFModel(fresh(request.param).eval())


def logits_of(model: HFModel, batch) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(batch.x, batch.positions, batch.segments)


def test_logits_of_packed_rows_equal_those_of_transformers_for_single_conversations(model):
    batch = packed([CHATS[:2], CHATS[2:]], 16)
    ours = logits_of(model, batch)
    for row, chats in enumerate((CHATS[:2], CHATS[2:])):
        at = 0
        for ids, _ in chats:
            with torch.no_grad():
                theirs = model.lm(input_ids=torch.tensor([ids])).logits[0]
            assert torch.allclose(ours[row, at : at + len(ids)], theirs, atol=1e-4)
            at += len(ids)
    assert model.separates == (model.lm.config.model_type not in APART)


def test_other_conversations_and_padding_never_change_a_logit(model):
    batch = packed([CHATS], 28)
    mine = batch.segments[0] == 1
    changed = torch.where(mine, batch.x, (batch.x + 17) % VOCAB)
    before, after = logits_of(model, batch)[0], logits_of(model, batch._replace(x=changed))[0]
    assert torch.allclose(before[mine], after[mine], atol=1e-6)
    assert not torch.allclose(before[~mine], after[~mine], atol=1e-2)


def test_loss_and_gradients_equal_cross_entropy_on_full_logits(model):
    batch = packed([CHATS[:2], CHATS[2:]], 16)
    theirs, weight = plain_loss(model, batch)
    ours = model(*inputs(batch)).total
    assert ours.item() / weight == pytest.approx(theirs.item() / weight, abs=1e-5)
    for a, b in zip(gradients(model, ours / weight), gradients(model, theirs / weight), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_answers_equal_those_of_transformers_generate(model):
    answers = generate(model, PROMPTS, max_tokens=6, end_ids=[])
    assert answers == [their_answer(model, prompt, 6) for prompt in PROMPTS]


def test_logits_with_the_cache_equal_those_without(model):
    forced = torch.randint(1, VOCAB, (3, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, cache = prefill(model, PROMPTS, room=4)
        for at in range(4):
            for row, prompt in enumerate(PROMPTS):
                theirs = model.lm(input_ids=torch.tensor([prompt + forced[row, :at].tolist()])).logits[0, -1]
                assert torch.allclose(logits[row], theirs, atol=1e-4)
            logits = model.step(forced[:, at], cache)


def their_answer(model: HFModel, prompt: list[int], count: int, **how: Any) -> list[int]:
    how = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | how
    return model.lm.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()


def qwen(tmp_path: Path) -> Path:
    fresh("qwen3").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "chat_template.jinja").write_text("hello")
    return tmp_path / "base"


def trained(model: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)
    given = inputs(packed([CHATS[:2], CHATS[2:]], 16))
    for _ in range(steps):
        (model(*given).total / given.targets.weight).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_trained_and_saved_model_has_the_same_logits_in_transformers(tmp_path):
    model = open_model(qwen(tmp_path))
    batch = packed([CHATS], 24)
    before = logits_of(model, batch)
    trained(model, 20)
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    ids = torch.tensor([CHATS[0][0]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(input_ids=ids).logits
    ours = logits_of(model, packed([CHATS[:1]], 5))
    assert torch.equal(ours, theirs)
    assert not torch.allclose(before, logits_of(model, batch), atol=0.1)
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= saved
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == "hello"


def test_a_generation_config_that_transformers_refuses_to_write_is_copied_verbatim(tmp_path):
    folder = qwen(tmp_path)
    # The generation configs of some published models set a temperature without do_sample.
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6}')
    model = open_model(folder)
    for place in (tmp_path / "saved", folder):
        place.mkdir(exist_ok=True)
        model.save(place)
        assert (place / "generation_config.json").read_text() == '{"eos_token_id": [2, 3], "temperature": 0.6}'
    assert model.lm.generation_config.temperature == 0.6


def test_given_weights_are_saved_instead_of_the_models_own(tmp_path):
    model = open_model(qwen(tmp_path))
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save(tmp_path / "base", state)
    again = open_model(tmp_path / "base").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_checkpointed_blocks_have_the_same_gradients(tmp_path):
    model = open_model(qwen(tmp_path)).train()
    given = inputs(packed([CHATS], 24))
    wanted = gradients(model, model(*given).total)
    model.checkpoint_blocks()
    for a, b in zip(gradients(model, model(*given).total), wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_bfloat16_compute_keeps_float32_gradients(tmp_path):
    model = open_model(qwen(tmp_path), compute=torch.bfloat16)
    given = inputs(packed([CHATS], 24))
    rough = model(*given).total
    model.compute = None
    assert rough.item() == pytest.approx(model(*given).total.item(), rel=0.02)
    assert {gradient.dtype for gradient in gradients(model, rough)} == {torch.float32}


def test_the_decoder_layers_are_located(model):
    assert len(model.blocks()) == 2


def test_sampled_answers_depend_only_on_their_keys(tmp_path):
    model = open_model(qwen(tmp_path))
    hot = Sampling(temperature=1.5, seed=3)
    together = generate(model, PROMPTS, max_tokens=8, end_ids=[0], sampling=hot)
    assert together == [
        generate(model, [prompt], max_tokens=8, end_ids=[0], sampling=hot, first_row=row)[0]
        for row, prompt in enumerate(PROMPTS)
    ]


def test_beam_search_finds_the_answer_of_transformers(tmp_path):
    model = open_model(qwen(tmp_path))
    found = beam_search(model, PROMPTS, beams=4, max_tokens=6, end_ids=[7])
    for prompt, answer in zip(PROMPTS, found, strict=True):
        theirs = their_answer(model, prompt, 6, num_beams=4, eos_token_id=7, early_stopping="never")
        assert answer == (theirs[: theirs.index(7) + 1] if 7 in theirs else theirs)


def test_a_model_whose_logits_are_not_those_of_its_head_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(HFModel, "head", lambda self: LMHead(self.lm.get_output_embeddings().weight, scale=2.0))
    with pytest.raises(DataError, match="the logits differ from the output of the head"):
        open_model(qwen(tmp_path))


@pytest.mark.parametrize("weights", ["float32", "stored", "bfloat16"])
def test_a_model_with_nan_weights_is_refused(tmp_path, weights):
    folder = qwen(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 2] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="the logits are NaN, because some weights are NaN or infinite"):
        open_model(folder, weights=weights)


def test_folders_that_transformers_cannot_open_are_a_one_line_error(tmp_path):
    folder = qwen(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for broken in (config | {"model_type": "nonesuch"}, {"model_type": "vit"}):
        (folder / "config.json").write_text(json.dumps(broken))
        with pytest.raises(
            DataError, match="transformers cannot load this folder as a causal language model"
        ) as caught:
            open_model(folder)
        assert "\n" not in str(caught.value)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        open_model(folder)
