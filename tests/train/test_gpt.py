from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import SIZES, VOCAB, conversation, gradients, inputs, packed, small_gpt
from torch import Tensor

from chatmill.errors import DataError
from chatmill.train import GPT, GPTSizes
from chatmill.train.load_model import open_model

CHATS = [conversation(length, seed=length) for length in (6, 11, 9)]


def logits_of(model: GPT, batch) -> Tensor:
    with torch.no_grad():
        return model.logits(batch.x, batch.positions, batch.segments)


def alone(model: GPT, ids: list[int]) -> Tensor:
    return logits_of(model, packed([[(ids, [0.0] * len(ids))]], len(ids)))[0]


@pytest.mark.parametrize("sizes", [SIZES, replace(SIZES, tie_weights=False, head_dim=16, n_kv_head=None)])
def test_logits_equal_those_of_transformers_qwen3(sizes):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = small_gpt(sizes)
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=sizes.n_embd,
            intermediate_size=sizes.ffn,
            num_hidden_layers=sizes.n_layer,
            num_attention_heads=sizes.n_head,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_size,
            rms_norm_eps=sizes.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
            tie_word_embeddings=sizes.tie_weights,
            max_position_embeddings=sizes.max_positions,
        )
    )
    state = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    state["lm_head.weight"] = model.head().weight
    for number, block in enumerate(model.layers):
        q, k, v = block.attention.qkv.weight.split([heads * sizes.head_size for heads in block.attention.heads])
        state |= {
            f"model.layers.{number}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": block.attention_norm.weight,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": block.attention.out.weight,
                "self_attn.q_norm": block.attention.q_norm.weight,
                "self_attn.k_norm": block.attention.k_norm.weight,
                "post_attention_layernorm": block.mlp_norm.weight,
                "mlp.gate_proj": block.mlp.gate.weight,
                "mlp.up_proj": block.mlp.up.weight,
                "mlp.down_proj": block.mlp.down.weight,
            }.items()
        }
    theirs.load_state_dict(state)
    ids = torch.tensor([chat[0] + [0] * (11 - len(chat[0])) for chat in CHATS])
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits
    ours = torch.stack([alone(model, row) for row in ids.tolist()])
    assert torch.allclose(ours, wanted, atol=1e-4)


@pytest.fixture(scope="module")
def model() -> GPT:
    return small_gpt()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
@settings(max_examples=25)
def test_other_conversations_and_padding_never_change_a_logit(model, lengths, data):
    chats = [conversation(length, seed=length) for length in lengths]
    batch = packed([chats], sum(lengths) + data.draw(st.integers(0, 5)))
    mine = data.draw(st.integers(0, len(chats) - 1))
    others = batch.segments[0] != mine
    changed = batch.x.clone()
    changed[0, others] = torch.randint(0, VOCAB, (int(others.sum()),))
    before, after = logits_of(model, batch)[0], logits_of(model, batch._replace(x=changed))[0]
    # Logits are bitwise equal if only other conversations change, and equal up to rounding if the conversation is
    # alone in its row.
    assert torch.equal(before[~others], after[~others])
    assert torch.allclose(before[~others], alone(model, chats[mine][0]), atol=1e-4)


def test_earlier_tokens_of_the_same_conversation_change_logits(model):
    batch = packed([CHATS], 30)
    changed = batch.x.clone()
    changed[0, 6] = (changed[0, 6] + 1) % VOCAB
    moved = (logits_of(model, batch) != logits_of(model, batch._replace(x=changed)))[0].any(dim=1)
    assert moved.tolist() == [False] * 6 + [True] * 11 + [False] * 13


def test_conversations_mix_without_segment_ids(model):
    batch = packed([CHATS], 30)
    borderless = batch._replace(segments=torch.zeros_like(batch.segments))
    apart, mixed = logits_of(model, batch)[0], logits_of(model, borderless)[0]
    assert torch.equal(apart[:6], mixed[:6]) and not torch.allclose(apart[6:26], mixed[6:26], atol=0.1)


def test_checkpointed_blocks_have_the_same_gradients():
    model = small_gpt()
    given_ = inputs(packed([CHATS], 30))
    wanted = gradients(model, model(*given_).total)
    model.checkpoint_blocks()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, model(*given_).total), wanted, strict=True))


def test_bfloat16_compute_keeps_float32_weights_and_gradients():
    exact, rough = small_gpt(), small_gpt(compute=torch.bfloat16)
    given_ = inputs(packed([CHATS], 30))
    assert rough.hidden(*given_[:3]).dtype == torch.bfloat16
    a, b = exact(*given_).total, rough(*given_).total
    assert a.item() != b.item() and b.item() == pytest.approx(a.item(), rel=0.02)
    found = gradients(rough, b)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    for ours, wanted in zip(found, gradients(exact, a), strict=True):
        assert torch.nn.functional.cosine_similarity(ours.flatten(), wanted.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("changes", [{}, {"tie_weights": False, "qk_norm": False}, {"head_dim": 10, "n_ffn": None}])
def test_num_parameters_equals_that_of_the_model(changes):
    sizes = replace(SIZES, **changes)
    assert sizes.num_parameters == GPT(sizes).num_parameters


def test_new_models_predict_uniformly_and_depend_on_the_seed():
    torch.manual_seed(1)
    model = GPT(SIZES)
    torch.manual_seed(1)
    again = GPT(SIZES)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    given_ = inputs(packed([CHATS], 30))
    with torch.no_grad():
        mean = model(*given_).total.item() / given_.targets.weight
    assert mean == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.1)


def test_the_shipped_configs_have_the_parameters_in_their_names():
    qwen = GPTSizes(
        vocab_size=151936, n_layer=28, n_embd=1024, n_head=16, n_kv_head=8, head_dim=128, n_ffn=3072, qk_norm=True
    )
    with torch.device("meta"):
        assert GPT(qwen).num_parameters == 596_049_920


def test_a_saved_model_loads_bitwise_equal(tmp_path):
    model = small_gpt(replace(SIZES, tie_weights=False))
    model.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = open_model(tmp_path)
    assert isinstance(again, GPT) and again.sizes == model.sizes
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_folder_without_a_model_is_a_one_line_error(tmp_path):
    with pytest.raises(DataError, match=r"has no config.json"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match=r"is not a JSON object"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_embd": 64}, r"model.safetensors: .* does not match config.json"),
        ({"n_heads": 4}, r"unknown key n_heads; expected one of"),
        ({"n_layer": None}, r"n_layer"),
        ({"n_embd": 33}, r"n_embd 33 is not a multiple of n_head 4"),
        ({"n_kv_head": 3}, r"n_head 4 is not a multiple of n_kv_head 3"),
        ({"head_dim": 5}, r"head_dim is 5"),
    ],
)
def test_a_config_that_does_not_match_is_a_one_line_error(tmp_path, change, says):
    small_gpt().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {name: value for name, value in {**config, **change}.items() if value is not None or name not in change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=says) as caught:
        open_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("n_layer", "1", "an integer of at least 1"),
        ("n_layer", 1.5, "an integer of at least 1"),
        ("n_embd", 0, "an integer of at least 1"),
        ("vocab_size", 271.0, "an integer of at least 1"),
        ("max_positions", "128", "an integer of at least 1"),
        ("n_kv_head", True, "an integer of at least 1, or null"),
        ("rope_theta", "x", "a number of at least 1"),
        ("norm_eps", None, "a number of at least 0"),
        ("tie_weights", "x", "true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_one_line_error(tmp_path, name, value, right):
    small_gpt().save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(DataError) as caught:
        open_model(tmp_path)
    assert str(caught.value) == f"{path}: model: {name} is {json.dumps(value)}; expected {right}"


def test_a_norm_epsilon_of_zero_is_allowed():
    assert GPTSizes(vocab_size=8, n_layer=1, n_embd=8, n_head=2, norm_eps=0).norm_eps == 0


def test_truncated_weights_are_a_one_line_error(tmp_path):
    small_gpt().save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"model.safetensors: has 69,916 bytes of tensors, but its header lists 70,016"):
        open_model(tmp_path)
