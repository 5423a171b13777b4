"""The viewer and the report in a real Chromium: they are clicked through, and no text of a dataset acts in them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest
from show_fixtures import HOSTILE, line, make
from viewing import SHOTS, chromium, viewer

from chatmill.audit import Audit
from chatmill.format import load_format
from chatmill.load.loader import EpisodeLoader
from chatmill.show.report import BLOCK_SIZES, report_html
from chatmill.show.stats import split_stats
from chatmill.tokenizer import train_bpe

WAIT = 500_000
"""Milliseconds until something that should be there is missed, a little less than a test may take."""


@pytest.fixture(scope="module")
def browser():
    executable = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In a container root has no sandbox to put the page in; the page is ours.
        opened = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"], timeout=WAIT)
        yield opened
        opened.close()


def count(page, selector: str, number: int) -> None:
    """Wait until so many elements are there."""
    page.wait_for_function(f"() => document.querySelectorAll('{selector}').length === {number}")


@dataclass
class Watched:
    """A page, with everything that should never happen on it."""

    page: object
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def shot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")


@pytest.fixture
def watched(browser):
    """A page on which an error, a dialog, another page or a download is a fault, whatever the test looks at."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    seen = Watched(page)
    page.on("console", lambda message: seen.faults.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (seen.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("download", lambda download: seen.faults.append("download"))
    page.on("request", lambda request: seen.requests.append(request.url))
    context.on("page", lambda other: seen.faults.append(f"another page: {other.url}") if other is not page else None)
    yield seen
    assert seen.faults == []
    context.close()


@pytest.fixture(scope="module")
def chats_url(tmp_path_factory):
    """A viewer of 120 conversations in a trained vocabulary, with the audit log of a run."""
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
    assert "is trained: the assistant says it, and train_on assistant trains that (rule role)." in page.inner_text(
        ".sentence"
    )
    page.wait_for_selector(".panel-record pre")
    assert '"content"' in page.inner_text(".panel-record pre")
    assert "Says what the conversation was made of." in page.inner_text(".panel-record")
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
    assert "step 99 is not in it" in page.inner_text(".failure")
    # A refused question is a line in the console by itself.
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
    # The line of a megabyte comes in pieces.
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_without_a_request_and_is_used_by_keyboard(watched, hostile, tmp_path, scheme):
    splits = [split_stats(hostile.dataset["train"], "train", block_sizes=BLOCK_SIZES)]
    (tmp_path / "report.html").write_text(report_html(hostile, splits, version="0"), "utf-8")
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    page.goto((tmp_path / "report.html").as_uri())
    assert watched.requests == [(tmp_path / "report.html").as_uri()]
    assert page.evaluate("window.acted") is None
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert dark == (scheme == "dark")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#train"
    assert page.locator("article").count() == len(HOSTILE) + 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("scrollTo(0, 0)")
    watched.shot(f"report-{scheme}")
    page.emulate_media(media="print", color_scheme=scheme)
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    watched.shot(f"report-{scheme}-print")


def test_a_vocabulary_that_was_trained_reads_as_text(chats_url, watched):
    page = watched.page
    page.goto(f"{chats_url}#/episodes?split=train&episode=1")
    page.wait_for_selector(".t")
    assert "What is silver, number 1?" in page.inner_text(".turn:first-child .tokens").replace("\n", "")
