from __future__ import annotations

import random

import pytest
import torch

from chatmill import (
    DEFAULT_SYSTEM_TEXT,
    IGNORE_INDEX,
    collate_sft_batch,
    pack_sft_ids_and_mask,
    render_chat_sft,
    serialize_chat_to_ids,
    sft_loss_mask_for_ids,
)

SYS, USR, ASST, EOT = 1, 2, 3, 4
SPECIAL = {"sys_id": SYS, "usr_id": USR, "asst_id": ASST, "eot_id": EOT}
WORDS = ["you", "are", "a", "helpful", "assistant.", "hi", "there", "how", "fine", "and", "bye", "ok", "well"]
ID = {word: 10 + number for number, word in enumerate(WORDS)}


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ID[word] for word in text.split(" ") if word]

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": SYS, "usr": USR, "asst": ASST, "eot": EOT}


TOKENIZER = WordTokenizer()
DEFAULT_TURN = [SYS, *TOKENIZER.encode(DEFAULT_SYSTEM_TEXT), EOT]


def chat(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def serialize(example: dict) -> list[int]:
    return serialize_chat_to_ids(example, tokenizer=TOKENIZER, default_system_text=DEFAULT_SYSTEM_TEXT)


def pack(ids, mask, S, pad_id=EOT):
    return pack_sft_ids_and_mask(ids, mask, S=S, pad_id=pad_id, **SPECIAL)


def test_serialization_starts_with_the_default_system_turn_and_ends_every_turn():
    ids = serialize(chat(("user", "hi there"), ("assistant", "hi"), ("user", "how"), ("assistant", "fine and well")))
    assert ids == [
        *[SYS, ID["you"], ID["are"], ID["a"], ID["helpful"], ID["assistant."], EOT],
        *[USR, ID["hi"], ID["there"], EOT],
        *[ASST, ID["hi"], EOT],
        *[USR, ID["how"], EOT],
        *[ASST, ID["fine"], ID["and"], ID["well"], EOT],
    ]


def test_a_given_system_message_takes_the_place_of_the_default():
    ids = serialize(chat(("system", "ok"), ("user", "hi"), ("assistant", "bye")))
    assert ids == [SYS, ID["ok"], EOT, USR, ID["hi"], EOT, ASST, ID["bye"], EOT]


def test_the_mask_is_true_on_assistant_content_and_its_end_alone():
    ids = serialize(chat(("system", "ok"), ("user", "hi there"), ("assistant", "fine well")))
    assert ids == [SYS, ID["ok"], EOT, USR, ID["hi"], ID["there"], EOT, ASST, ID["fine"], ID["well"], EOT]
    assert sft_loss_mask_for_ids(ids, **SPECIAL) == [False] * 8 + [True, True, True]


def test_packing_drops_the_oldest_exchanges_first_and_keeps_the_last_answer():
    turns = [("system", "ok")]
    for word in ("hi", "how", "bye"):
        turns += [("user", word), ("assistant", "fine and well")]
    ids = serialize(chat(*turns))
    mask = sft_loss_mask_for_ids(ids, **SPECIAL)
    system = [SYS, ID["ok"], EOT]
    answer = [ASST, ID["fine"], ID["and"], ID["well"], EOT]
    first, second, third = ([USR, ID[word], EOT, *answer] for word in ("hi", "how", "bye"))
    trained = [False] * 4 + [True] * 4
    assert pack(ids, mask, 27) == (system + first + second + third, [False] * 3 + trained * 3)
    assert pack(ids, mask, 26) == (system + second + third + [EOT] * 7, [False] * 3 + trained * 2 + [False] * 7)
    assert pack(ids, mask, 18) == (system + third + [EOT] * 7, [False] * 3 + trained + [False] * 7)
    # When only one exchange is left, tokens are removed from the start, including the system turn.
    assert pack(ids, mask, 10) == ((system + third)[1:], [False] * 2 + trained)
    assert pack(ids, mask, 4) == (answer[1:], [True] * 4)
    assert pack(ids, mask, 1) == ([EOT], [True])


def test_short_rows_are_padded_and_padding_is_never_trained():
    ids = [SYS, EOT, USR, ID["hi"], EOT, ASST, ID["ok"], EOT]
    mask = [False] * 6 + [True, True]
    assert pack(ids, mask, 11) == ([*ids, EOT, EOT, EOT], [*mask, False, False, False])
    assert pack(ids, mask, 9, pad_id=0) == ([*ids, 0], [*mask, False])


def test_collation_shifts_x_against_y_and_ignores_what_is_not_trained():
    rows = [([1, 2, 3, 4, 5], [False, False, True, True, False]), ([6, 7, 8, 9, 4], [True, True, False, False, True])]
    x, y, loss_mask = collate_sft_batch(rows, T=4, device="cpu")
    assert torch.equal(x, torch.tensor([[1, 2, 3, 4], [6, 7, 8, 9]]))
    assert torch.equal(y, torch.tensor([[-100, 3, 4, -100], [7, -100, -100, 4]]))
    assert torch.equal(loss_mask, torch.tensor([[False, True, True, False], [True, False, False, True]]))
    assert (x.dtype, y.dtype, loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)


def test_collation_takes_another_ignore_index_and_no_rows_at_all():
    _, y, _ = collate_sft_batch([([1, 2, 3], [True, False, True])], T=2, device="cpu", ignore_index=-1)
    assert torch.equal(y, torch.tensor([[-1, 3]]))
    x, y, loss_mask = collate_sft_batch([], T=2, device="cpu")
    assert x.shape == y.shape == loss_mask.shape == (0, 2)


# Behavior that the specification leaves open.


def test_the_mask_is_the_literal_scan_even_where_a_span_never_closes():
    ids = [ASST, 10, USR, 11, EOT, 12, ASST, 13, ASST, 14, EOT, EOT, ASST]
    assert sft_loss_mask_for_ids(ids, **SPECIAL) == [
        *[False, True, True, True, True, False],
        *[False, True, False, True, True, False, False],
    ]
    assert sft_loss_mask_for_ids([], **SPECIAL) == []


def test_hard_truncation_keeps_the_given_mask_of_a_cut_answer():
    ids = [SYS, 10, EOT, USR, 11, EOT, ASST, *range(20, 30), EOT]
    mask = sft_loss_mask_for_ids(ids, **SPECIAL)
    assert pack(ids, mask, 5) == ([26, 27, 28, 29, EOT], [True] * 5)


def test_turns_after_the_last_answer_go_before_any_token_of_it():
    ids = [SYS, 10, EOT, USR, 11, EOT, ASST, 12, 13, EOT, USR, 14, EOT, USR, 15, EOT]
    mask = sft_loss_mask_for_ids(ids, **SPECIAL)
    assert pack(ids, mask, 15) == ([*ids[:13], EOT, EOT], [*mask[:13], False, False])
    assert pack(ids, mask, 10) == (ids[:10], mask[:10])
    assert pack(ids, mask, 4) == (ids[6:10], mask[6:10])


@pytest.mark.parametrize(
    ("ids", "S", "kept"),
    [
        ([USR, 10, EOT, USR, 11, EOT, ASST, 12, EOT], 6, [USR, 11, EOT, ASST, 12, EOT]),
        ([ASST, 10, EOT, USR, 11, EOT, ASST, 12, EOT], 8, [USR, 11, EOT, ASST, 12, EOT, EOT, EOT]),
        ([SYS, 9, EOT, ASST, 10, EOT, USR, 11, EOT, ASST, 12, EOT], 9, [SYS, 9, EOT, USR, 11, EOT, ASST, 12, EOT]),
        ([USR, 10, EOT, USR, 11, EOT], 4, [USR, 11, EOT, EOT]),
        ([SYS, 9, 9, 9, EOT], 3, [9, 9, EOT]),
        ([9, 9, 9, 9], 3, [9, 9, 9]),
        ([USR, 10, EOT, ASST, 11, 12], 4, [EOT, ASST, 11, 12]),
        ([], 2, [EOT, EOT]),
    ],
)
def test_imperfect_input_never_raises_and_keeps_the_last_answer(ids, S, kept):
    assert pack(ids, sft_loss_mask_for_ids(ids, **SPECIAL), S)[0] == kept


def test_render_chat_sft_labels_assistant_content_and_ends_in_any_order():
    messages = chat(("assistant", "ok"), ("system", "a"), ("user", "hi"), ("assistant", "fine"))["messages"]
    ids, labels = render_chat_sft(TOKENIZER, messages)
    assert ids == [ASST, ID["ok"], EOT, SYS, ID["a"], EOT, USR, ID["hi"], EOT, ASST, ID["fine"], EOT]
    assert labels == [-100, ID["ok"], EOT, -100, -100, -100, -100, -100, -100, -100, ID["fine"], EOT]
    assert render_chat_sft(TOKENIZER, messages, add_final_eot=False) == (ids[:-1], labels[:-1])


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], '"messages" must be a list of at least one'),
        ("hi", '"messages" must be a list of at least one'),
        ([{"role": "user", "content": "hi"}, {"role": "bot", "content": "hi"}], 'message 1 has role "bot"; expected'),
        ([{"role": "assistant", "content": 3}], "message 0 has content of type int; expected a string"),
        ([{"role": "assistant"}], 'message 0 must be an object with exactly the keys "role" and "content"'),
        ([{"role": "assistant", "content": "a", "train": False}], "message 0 must be an object with exactly the keys"),
        ([None], "message 0 must be an object"),
        ([{"role": ["user"], "content": "a"}], "message 0 has role"),
    ],
)
def test_bad_messages_are_a_value_error_that_names_the_index(messages, line):
    with pytest.raises(ValueError, match=line):
        serialize({"messages": messages})
    with pytest.raises(ValueError, match=line):
        render_chat_sft(TOKENIZER, messages)


def test_other_bad_input_is_a_value_error():
    with pytest.raises(ValueError, match="message 1 has role system; only the first message may be a system message"):
        serialize(chat(("user", "hi"), ("system", "ok")))
    with pytest.raises(ValueError, match="no message has role assistant"):
        render_chat_sft(TOKENIZER, chat(("user", "hi"))["messages"])
    with pytest.raises(ValueError, match="ids has 2 entries, but mask has 1"):
        pack([1, 2], [True], 4)
    with pytest.raises(ValueError, match="S is 0"):
        pack([1], [True], 0)
    with pytest.raises(ValueError, match="token ids must be"):
        pack([-1], [True], 4)
    with pytest.raises(ValueError, match="item 1 has 2 ids"):
        collate_sft_batch([([1, 2, 3], [True] * 3), ([1, 2], [True] * 2)], T=2, device="cpu")


def test_a_tokenizer_without_a_needed_special_token_is_named():
    class Bare(WordTokenizer):
        def special_token_ids(self):
            return {"sys": SYS, "usr": USR}

    with pytest.raises(ValueError, match="no special token id for asst, eot"):
        serialize_chat_to_ids(chat(("user", "hi")), tokenizer=Bare(), default_system_text="ok")


def oracle_serialize(messages: list[tuple[str, str]]) -> list[int]:
    if messages[0][0] != "system":
        messages = [("system", DEFAULT_SYSTEM_TEXT), *messages]
    out = []
    for role, content in messages:
        out.append({"system": SYS, "user": USR, "assistant": ASST}[role])
        out.extend(ID[word] for word in content.split())
        out.append(EOT)
    return out


def oracle_mask(ids: list[int]) -> list[bool]:
    inside, out = False, []
    for i in ids:
        if i == ASST:
            inside = True
            out.append(False)
        else:
            out.append(inside)
            if i == EOT:
                inside = False
    return out


def oracle_units(ids: list[int]) -> list[tuple[int, list[int]]]:
    """Return (role, positions) for each turn, from its role token to the first end token, and (0, positions) for each
    run of tokens between turns.
    """
    units: list[tuple[int, list[int]]] = []
    open_turn = False
    for at, i in enumerate(ids):
        if i in (SYS, USR, ASST):
            units.append((i, [at]))
            open_turn = True
        elif open_turn:
            units[-1][1].append(at)
            open_turn = i != EOT
        elif units and units[-1][0] == 0:
            units[-1][1].append(at)
        else:
            units.append((0, [at]))
    return units


def oracle_pack(ids: list[int], mask: list[bool], S: int, pad: int) -> tuple[list[int], list[bool]]:
    units = oracle_units(ids)
    roles = [role for role, _ in units]
    spoken = [at for at, role in enumerate(roles) if role]
    head = spoken[0] + 1 if spoken and roles[spoken[0]] == SYS else 0
    last = max((at for at, role in enumerate(roles) if role == ASST), default=len(units) - 1)
    exchanges: list[list[int]] = []
    for at in range(head, len(units)):
        if roles[at] == USR or not exchanges:
            exchanges.append([])
        exchanges[-1].append(at)
    keep = list(range(len(units)))

    def size() -> int:
        return sum(len(units[at][1]) for at in keep)

    while size() > S and exchanges and last not in exchanges[0] and last >= head:
        gone = exchanges.pop(0)
        keep = [at for at in keep if at not in gone]
    while size() > S and keep[-1] > last:
        keep.pop()
    places = [place for at in keep for place in units[at][1]]
    places = places[max(0, len(places) - S) :]
    padding = S - len(places)
    return [ids[p] for p in places] + [pad] * padding, [mask[p] for p in places] + [False] * padding


def random_chat(rng: random.Random) -> list[tuple[str, str]]:
    turns = [("system", " ".join(rng.choices(WORDS, k=rng.randrange(4))))] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 5)):
        turns.append(("user", " ".join(rng.choices(WORDS, k=rng.randrange(6)))))
        turns.append(("assistant", " ".join(rng.choices(WORDS, k=rng.randrange(8)))))
    if rng.random() < 0.3:
        turns.append(("user", " ".join(rng.choices(WORDS, k=rng.randrange(4)))))
    if rng.random() < 0.2:
        turns = [turn for turn in turns if rng.random() < 0.8] or turns
        turns = [turn for at, turn in enumerate(turns) if at == 0 or turn[0] != "system"]
    return turns


def test_thousands_of_random_chats_agree_with_the_oracle():
    rng = random.Random(4)
    for _ in range(2_500):
        turns = random_chat(rng)
        ids = serialize(chat(*turns))
        assert ids == oracle_serialize(turns)
        mask = sft_loss_mask_for_ids(ids, **SPECIAL)
        assert mask == oracle_mask(ids)
        S = rng.randrange(2, len(ids) + 4)
        packed, packed_mask = pack(ids, mask, S)
        assert (packed, packed_mask) == oracle_pack(ids, mask, S, EOT)
        if ASST in ids:
            assert [i for i, trained in zip(packed, packed_mask, strict=True) if trained][-1] == EOT


def test_thousands_of_token_streams_of_any_kind_agree_with_the_oracle():
    rng = random.Random(5)
    for _ in range(2_500):
        ids = rng.choices([SYS, USR, ASST, EOT, EOT, 10, 11], k=rng.randrange(0, 24))
        mask = sft_loss_mask_for_ids(ids, **SPECIAL)
        assert mask == oracle_mask(ids)
        S = rng.randrange(2, 20)
        assert pack(ids, mask, S, pad_id=0) == oracle_pack(ids, mask, S, 0)


def test_collation_of_random_rows_agrees_with_a_loop():
    rng = random.Random(6)
    for _ in range(200):
        T, B = rng.randrange(1, 9), rng.randrange(1, 5)
        rows = [
            ([rng.randrange(99) for _ in range(T + 1)], [rng.random() < 0.5 for _ in range(T + 1)]) for _ in range(B)
        ]
        x, y, loss_mask = collate_sft_batch(rows, T=T, device="cpu")
        assert x.tolist() == [ids[:T] for ids, _ in rows]
        assert loss_mask.tolist() == [mask[1:] for _, mask in rows]
        assert y.tolist() == [
            [i if trained else IGNORE_INDEX for i, trained in zip(ids[1:], mask[1:], strict=True)] for ids, mask in rows
        ]
