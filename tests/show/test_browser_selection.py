from __future__ import annotations

import pytest
from show_fixtures import line, make
from viewing import viewer, watched_page

from chatmill.prepare.engine import LocalEngine
from chatmill.prepare.job import InputSource, Job
from chatmill.prepare.pipeline import prepare_dataset
from chatmill.store.read import open_dataset

LINES = [line(f"question {n}", f"answer {n}") for n in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection")
    make(folder, LINES, format="chatml", file="ä <b>.jsonl")
    return folder


def saved(page, button: str) -> str:
    with page.expect_download() as download:
        page.click(f"text={button}")
    return download.value.path().read_text("utf-8")


def test_episodes_are_excluded_and_tagged_and_the_exports_are_used(browser, folder, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (folder / "v0").rglob("*")}
    with viewer(folder / "v0", tmp_path, "--records", str(folder)) as url, watched_page(browser) as watched:
        page = watched.page
        for episode, tags in ((2, "odd, check"), (5, "check"), (7, "")):
            page.goto(f"{url}#/episodes?split=train&episode={episode}")
            page.wait_for_function(f"() => document.querySelector('.episode-head b')?.textContent === '{episode}'")
            if episode != 5:
                page.keyboard.press("x")
                page.wait_for_selector(".exclude[aria-pressed=true]")
            if tags:
                page.keyboard.press("t")
                page.keyboard.type(tags)
                page.keyboard.press("Enter")
                page.keyboard.press("Escape")
        assert page.locator(".items .badges").all_inner_texts() == ["excluded\nodd\ncheck", "check", "excluded"]
        page.reload()
        page.click("text=Selection")
        page.wait_for_selector(".selected tbody tr")
        assert "3 episodes of train tagged or excluded" in page.inner_text(".page-head")
        excluded = saved(page, "As exclude list")
        page.select_option("#which", "tag check")
        records = saved(page, "As JSONL records")
        assert all(address.startswith((url, "blob:")) for address in watched.requests)
    assert records == LINES[2] + LINES[5]
    (tmp_path / "exclude.jsonl").write_text(excluded)
    job = Job((InputSource((str(folder / "ä <b>.jsonl"),)),), exclude=str(tmp_path / "exclude.jsonl"))
    prepare_dataset(job, tmp_path / "next", engine=LocalEngine(workers=1))
    train = open_dataset(tmp_path / "next")["train"]
    kept = [number for number in range(12) if number not in (2, 7)]
    assert train.rows(range(10)).origins["line"].tolist() == [number + 1 for number in kept]
    assert {path: path.stat().st_mtime_ns for path in (folder / "v0").rglob("*")} == before
