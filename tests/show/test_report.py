from __future__ import annotations

from html.parser import HTMLParser

import pytest
from show_fixtures import HOSTILE, line, make

from chatmill.show.charts import compact, nice
from chatmill.show.report import BLOCK_SIZES, SAMPLES, report_html
from chatmill.show.stats import split_stats

EMPTY = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def page_of(shown) -> str:
    names = [name for name in shown.dataset.splits if len(shown.dataset[name])]
    splits = [split_stats(shown.dataset[name], name, block_sizes=BLOCK_SIZES) for name in names]
    return report_html(shown, splits, version="0")


def test_the_page_is_whole_loads_nothing_and_runs_nothing(hostile):
    page = Page(page_of(hostile))
    names = {name for name, _ in page.elements}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "audio", "video", "base"})
    for name, attributes in page.elements:
        assert not any(key.startswith("on") for key in attributes)
        assert not {"src", "srcset", "style", "xlink:href", "action"} & attributes.keys()
        if "href" in attributes:
            assert name == "a" and attributes["href"].startswith("#")
    links = {attributes["href"][1:] for name, attributes in page.elements if "href" in attributes}
    assert links <= {attributes.get("id") for _, attributes in page.elements}
    policy = next(
        each["content"] for name, each in page.elements if each.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "url(" not in page_of(hostile)


def test_hostile_texts_are_shown_as_text(hostile):
    page = Page(page_of(hostile))
    text = page.text
    for words in ("<script>", "</textarea>", "onerror=", "{{7*7}}", "\\x1b", "\\u202e", "\\x00", "<img src=x"):
        assert words in text
    assert "49" not in {each.strip() for each in page.words}
    assert text.replace("\n", "").replace("\u200d", "").isprintable()


def test_twenty_samples_are_shown_with_what_is_trained_filled(tmp_path):
    shown = make(tmp_path, [line(f"question {n}", f"answer {n}") for n in range(200)], val_split=0.2)
    page = Page(page_of(shown))
    samples = [each["aria-label"] for name, each in page.elements if name == "article"]
    assert len(samples) == SAMPLES
    assert len([each for each in samples if each.startswith("val")]) == 4
    assert samples[0] == "train 0" and samples[15] == f"train {len(shown.dataset['train']) - 1}"
    trained = sum(
        int(shown.row(*split_number).spans["weight"].astype(bool).sum())
        for split_number in ((each.split()[0], int(each.split()[1])) for each in samples)
    )
    assert len([each for name, each in page.elements if each.get("class") == "s w"]) == trained


def test_the_flow_and_the_ledger_show_removed_tokens_and_reasons(tmp_path):
    lines = [line("q", "a" * 60), line("q", "a"), '{"messages": [{"role": "user", "content": "alone"}]}\n', "{\n"]
    shown = make(tmp_path, lines, max_tokens=20, fit="turns", on_error="skip")
    text = Page(page_of(shown)).text
    for words in ("truncated: turns", "dropped: no trained tokens", "rejected: json", "context: user"):
        assert words in text
    for bucket, reason, entry in shown.ledger:
        assert bucket in text and reason in text and f"{entry.tokens:,}" in text


def test_the_same_dataset_gives_the_same_bytes(chats):
    assert page_of(chats) == page_of(chats)


@pytest.mark.parametrize("options", [{"pack": 64}, {"format": "post-training", "fit": "blocks", "max_tokens": 32}])
def test_packed_rows_and_blocks_have_a_page_too(tmp_path, options):
    shown = make(tmp_path, [line(f"question {n}", f"answer {n}") for n in range(20)], **options)
    assert "segment 0" in Page(page_of(shown)).text


def test_a_dataset_of_another_program_and_an_empty_one_have_a_page(tmp_path):
    import numpy as np

    from chatmill.show.dataset import open_view

    shard = tmp_path / "other" / "train" / "shard_00000"
    shard.mkdir(parents=True)
    np.arange(10, dtype="<u2").tofile(shard / "tokens.bin")
    np.array([[0, 4], [4, 6]], dtype="<u8").tofile(shard / "episodes.idx")
    np.array([0, 0, 1, 1, 0, 0, 0, 0, 0, 0], dtype="u1").tofile(shard / "mask.bin")
    page = Page(page_of(open_view(tmp_path / "other")))
    assert "written by another program" in page.text
    assert "⟨3⟩" in page.text
    assert "1 episode has no trained tokens" in page.text


def test_numbers_on_axes_are_short_and_round():
    assert [compact(n) for n in (0, 7, 1500, 20_000_000)] == ["0", "7", "1.5k", "20M"]
    assert [nice(n) for n in (0.2, 1, 1.1, 3, 26, 240)] == [0.2, 1, 2, 5, 50, 250]


def test_every_hostile_text_has_a_sample(hostile):
    assert len(HOSTILE) + 2 == len(hostile.dataset["train"]) <= SAMPLES
