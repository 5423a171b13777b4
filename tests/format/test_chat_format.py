from __future__ import annotations

import pytest

from chatmill.errors import ChatmillError, DataError, UsageError
from chatmill.format import PRESETS, load_format, parse_format
from chatmill.tokenizer import open_tokenizer

TAIL = "84a5023f67d74cf29cc4001becde983c"


def test_the_presets_have_the_documented_tokens_and_trained_parts():
    found = {name: (dict(load_format(name).tokens), load_format(name).trained) for name in PRESETS}
    assert found == {
        "chatml": ({"start": "<|im_start|>", "eot": "<|im_end|>"}, ("content", "close")),
        "ngpt": (
            {key: f"<|ngpt_{key}_{TAIL}|>" for key in ("sys", "usr", "asst", "eot")},
            ("content", "close"),
        ),
        "primer": ({key: f"<|{key}|>" for key in ("sys", "usr", "asst", "eot")}, ("content", "close")),
        "post-training": (
            {"sys": "<|SYSTEM|>", "usr": "<|USER|>", "asst": "<|ASSISTANT|>", "eot": "<|END|>", "eos": "<|EOS|>"},
            ("open", "content", "close"),
        ),
    }
    assert [load_format(name).default_system for name in PRESETS] == [None, "you are a helpful assistant.", None, None]
    assert [load_format(name).end for name in PRESETS] == ["", "", "", "<|EOS|>"]
    assert [load_format(name).eot for name in PRESETS] == ["eot"] * 4


@pytest.mark.parametrize("name", PRESETS)
def test_the_embedded_tokenizer_has_the_tokens_of_every_preset(name):
    format = load_format(name)
    ids = open_tokenizer("bytes", control=format.tokens).special_token_ids()
    assert list(ids) == list(format.tokens)
    assert len(set(ids.values())) == len(ids)
    assert min(ids.values()) >= 256


def test_text_is_split_at_the_longest_token_that_matches():
    format = parse_format(
        """
        [tokens]
        a = "<a>"
        b = "<a><b>"
        [user]
        open = "<a>"
        close = "<a><b>\\n"
        [assistant]
        open = "<a>x"
        close = "y<a>"
        """,
        where="own.toml",
    )
    assert format.split("1<a><b>2<a>3") == [(None, "1"), ("b", "<a><b>"), (None, "2"), ("a", "<a>"), (None, "3")]
    assert format.split("") == []
    assert (format.name, format.eot) == ("own", "a")


def test_a_custom_format_is_read_from_its_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'begin = "<s>"\n[tokens]\nbos = "<s>"\nturn = "<t>"\n'
        '[user]\nopen = "<t>Q: "\nclose = "<t>"\n[assistant]\nopen = "<t>A: "\nclose = "<t>"\n'
    )
    format = load_format(path)
    assert (format.name, format.begin, format.turns["user"].open) == ("mine", "<s>", "<t>Q: ")


def test_all_problems_of_a_format_are_reported_in_one_line():
    with pytest.raises(DataError) as caught:
        parse_format(
            """
            nmae = "x"
            trained = ["contents"]
            default_system = "hello"
            end = "bye"
            [tokens]
            eot = "<e>"
            same = "<e>"
            empty = ""
            [user]
            open = "hi"
            close = "there"
            shut = "x"
            [body]
            reasoning = "no hole"
            """,
            where="bad.toml",
        )
    line = str(caught.value)
    assert "\n" not in line
    for fault in (
        'bad.toml: unknown key "nmae"',
        "trained must be a non-empty list of open, content, close",
        "two keys in [tokens] name the same token",
        "tokens.empty must be a non-empty string",
        '[user] has unknown key "shut"',
        "[assistant] is missing; a format needs at least [user] and [assistant]",
        "user.open must start with a control token",
        "user.close must contain a control token",
        "end must consist only of control tokens",
        'body.reasoning must contain "{}" exactly once',
        "default_system is set but [system] is missing",
        "tokens.eot is never used",
    ):
        assert fault in line


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name = ", "not valid TOML"),
        ("tokens = 3", r"\[tokens\] must be a table"),
        ("name = 3", "name must be a string"),
        ("", r"\[tokens\] is missing"),
        ("[tokens]\na = 1", "tokens.a must be a non-empty string"),
        ('[tokens]\na = "<|a|>"\n[body]\ntools = "<|a|>{}"', "body.tools must be plain text"),
    ],
)
def test_other_problems_are_reported(text, fault):
    with pytest.raises(DataError, match=fault):
        parse_format(text, where="f.toml")


def test_an_unknown_format_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match='no format "chatlm"; expected chatml, ngpt, primer, post-training or a'):
        load_format("chatlm")
    with pytest.raises(ChatmillError, match="cannot be read"):
        load_format(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatmillError, match="not UTF-8"):
        load_format(tmp_path / "binary.toml")
