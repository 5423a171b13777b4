from __future__ import annotations

import json
import re

import pytest
from show_fixtures import HOSTILE, line, make
from viewing import count, viewer

from chatmill.audit import Audit
from chatmill.format import load_format
from chatmill.load.loader import EpisodeLoader
from chatmill.tokenizer import train_bpe


@pytest.fixture(scope="module")
def chats_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    metals = ["gold", "silver", "iron", "tin"]
    lines = [
        line(
            f"What is {metals[n % 4]}, number {n}?",
            f"It is a metal, {'very ' * (n % 7)}shiny.",
            "Sure?",
            "Yes \U0001f44d",
        )
        for n in range(119)
    ]
    lines.append(
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}, '
        '{"role": "assistant", "content": "a", "weight": 0.5}]}\n'
    )
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(train_bpe(said(lines), vocab_size=400, control=list(load_format("chatml").tokens.values())))
    shown = make(folder, lines, format="chatml", tokenizer=str(tokenizer))
    audit = Audit(folder / "logs", every=5)
    loader = EpisodeLoader(shown.path, {"batch_size": 4, "block_size": 128, "epoch_seed": 42}, listener=audit)
    for _ in range(12):
        loader.get_batch()
    audit.checkpoint()
    loader.close()
    audit.close()
    with viewer(shown.path, folder, "--audit", str(folder / "logs")) as url:
        yield url


def said(lines: list[str]) -> list[str]:
    return [message["content"] for each in lines for message in json.loads(each)["messages"]]


@pytest.fixture(scope="module")
def hostile_url(tmp_path_factory, hostile):
    with viewer(hostile.path, tmp_path_factory.mktemp("hostile-view"), "--records", str(hostile.path.parent)) as url:
        yield url


def test_search_filter_open_hover_and_click_a_token(watched, chats_url):
    page = watched.page
    page.goto(chats_url)
    page.wait_for_selector(".items li")
    assert page.locator(".items li").count() == 50
    watched.shot("list")

    page.fill("#query", "SILVER")
    count(page, ".items mark", 30)
    assert set(page.locator(".items mark").all_inner_texts()) == {"silver"}
    assert "30 of 120 episodes" in page.inner_text(".status")

    page.fill("#query", "")
    count(page, ".items li", 50)
    page.click(".filter-box summary")
    page.click("text=system")
    count(page, ".items li", 1)
    page.click("text=Clear all")
    count(page, ".items li", 50)
    page.fill("input[name=least]", "60")
    page.keyboard.press("Enter")
    page.wait_for_function("() => /^\\d+ of 120 episodes$/.test(document.querySelector('.status').textContent)")
    lengths = [
        int(re.match(r"\d+", text)[0]) for text in page.locator(".items .small span:first-child").all_inner_texts()
    ]
    assert lengths and min(lengths) >= 60
    watched.shot("filters")
    page.click("text=Clear all")

    page.select_option("select[name=sort]", "longest")
    page.wait_for_function("() => /sort=longest/.test(location.hash) && document.querySelector('.pager')")
    lengths = [
        int(re.match(r"\d+", text)[0]) for text in page.locator(".items .small span:first-child").all_inner_texts()
    ]
    assert len(lengths) == 50 and lengths == sorted(lengths, reverse=True)
    page.select_option("select[name=sort]", "")

    page.fill("#query", "very very shiny")
    page.wait_for_selector(".items mark")
    page.click(".items li:first-child a")
    page.wait_for_selector(".t.hit")
    token = page.locator(".t.w.hit").first
    token.hover()
    page.wait_for_selector("#tip:not([hidden])")
    tip = page.inner_text("#tip")
    assert "rule" in tip and "role" in tip and "assistant 1" in tip and token.get_attribute("data-id") in tip
    watched.shot("hover")
    token.click()
    page.wait_for_selector(".sentence")
    assert "is trained: train_on assistant selects assistant messages (rule role)." in page.inner_text(".sentence")
    page.wait_for_selector(".panel-record pre")
    assert '"content"' in page.inner_text(".panel-record pre")
    assert "The record is unchanged since the dataset was prepared." in page.inner_text(".panel-record")
    page.wait_for_selector(".panel-order .facts")
    watched.shot("token")
    context = page.locator(".t.r-user:not(.w)").first
    context.click()
    page.wait_for_function("() => document.querySelector('.sentence').textContent.includes('is context')")

    page.go_back()
    page.wait_for_function("() => document.querySelector('.sentence').textContent.includes('is trained')")
    page.click("text=Show text")
    assert page.locator(".turns.reading").count() == 1
    watched.shot("reading")
    page.click("text=Show tokens")


def test_the_page_is_used_by_keyboard(watched, chats_url):
    page = watched.page
    page.goto(chats_url)
    page.wait_for_selector(".items li")
    page.keyboard.press("/")
    page.keyboard.type("number 7?")
    count(page, ".items li", 1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_selector(".t")
    assert "train 7" in page.inner_text(".episode-head h1")
    page.locator(".t").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.n") == "3"
    page.keyboard.press("Enter")
    page.wait_for_selector(".sentence")
    assert page.inner_text(".sentence").startswith("Token 3 of train episode 7")


def test_the_rows_of_a_step_and_the_order_of_an_epoch(watched, chats_url):
    page = watched.page
    page.goto(chats_url)
    page.click("text=Audit")
    page.wait_for_selector(".timeline .event")
    actions = page.locator(".timeline .event b").all_inner_texts()
    assert actions[:3] == ["dataset", "epoch begins", "steps 0 to 4"]
    assert actions[-1] == "checkpoint"
    page.fill("#step", "7")
    page.click("text=Show")
    page.wait_for_selector(".step-rows h2")
    assert page.inner_text(".step-rows h2") == "Step 7"
    assert "4 rows of epoch 0, read again from the dataset; line 4 of the log has their digest." in page.inner_text(
        ".step-rows"
    )
    watched.shot("audit")
    page.locator(".step-rows .items a").first.click()
    page.wait_for_selector(".t")
    page.click("text=Order")
    page.wait_for_selector(".positions .items")
    assert "epoch/1, 120 positions" in page.inner_text(".page-head")
    watched.shot("order")
    page.click("text=Audit")
    page.fill("#step", "99")
    page.evaluate("document.querySelector('.page form').noValidate = true")
    watched.faults.clear()
    page.click("text=Show")
    page.wait_for_selector(".failure")
    assert "does not contain step 99" in page.inner_text(".failure")
    # The browser reports the rejected request in its console.
    assert all("400" in fault for fault in watched.faults)
    watched.faults.clear()


def test_no_text_of_a_hostile_dataset_acts_in_the_viewer(watched, hostile_url):
    page = watched.page
    page.goto(hostile_url)
    page.wait_for_selector(".items li")
    assert page.locator(".items li").count() == len(HOSTILE) + 2
    page.wait_for_selector("#indexing", state="hidden")
    for number in range(len(HOSTILE) + 2):
        page.evaluate("number => { location.hash = `#/episodes?split=train&episode=${number}` }", number)
        page.wait_for_function(
            "number => document.querySelector('.episode-head h1')?.textContent === `train ${number}`", arg=number
        )
        page.wait_for_selector(".panel-record pre")
        page.wait_for_function("() => document.querySelector('.panel-record pre')?.textContent.length > 0")
        if number == 0:
            watched.shot("hostile")
            page.locator(".t.w").nth(12).click()
            page.wait_for_selector(".sentence")
            assert "<script>" in page.inner_text(".panel-record pre")
        if number < len(HOSTILE):
            page.click("text=Show t")
            page.click("text=Show t")
    # An episode of about a million tokens is loaded in pieces.
    page.goto(f"{hostile_url}#/episodes?split=train&episode={len(HOSTILE)}")
    page.wait_for_selector(".more:not([hidden])")
    assert page.inner_text(".more") == "998,019 tokens more"
    page.click(".more")
    count(page, ".t", 4000)
    page.fill("#query", "<script>window.acted")
    page.wait_for_function(
        "() => document.querySelectorAll('.items li').length === 1 && document.querySelector('.items mark')"
    )
    watched.shot("hostile-search")
    assert page.evaluate("window.acted") is None
    assert page.evaluate("document.scripts.length") == 1
    assert page.evaluate("[...document.querySelectorAll('img')].map(each => each.src)") == [
        f"{hostile_url}page/icon.svg"
    ]
    shown = page.evaluate("document.body.textContent")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", shown)
    assert all(url.startswith(hostile_url) for url in watched.requests)


def test_a_vocabulary_that_was_trained_reads_as_text(chats_url, watched):
    page = watched.page
    page.goto(f"{chats_url}#/episodes?split=train&episode=1")
    page.wait_for_selector(".t")
    assert "What is silver, number 1?" in page.inner_text(".turn:first-child .tokens").replace("\n", "")
