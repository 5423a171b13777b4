from __future__ import annotations

from show_fixtures import line, make
from viewing import viewer


def test_near_duplicates_are_found_and_opened_with_the_keyboard(watched, tmp_path):
    text = " ".join(f"word{number}" for number in range(60))
    lines = [line("first", text), line("other", "short"), line("<b id=bold>third</b>", text)]
    shown = make(tmp_path, lines)
    with viewer(shown.path, tmp_path) as url:
        page = watched.page
        page.goto(f"{url}#/episodes?split=train&episode=0")
        page.wait_for_selector(".panel-near button")
        assert not [request for request in watched.requests if request.endswith("/near")]
        page.focus(".panel-near button")
        page.keyboard.press("Enter")
        page.wait_for_selector(".panel-near a")
        assert page.locator(".panel-near li").count() == 1
        assert page.inner_text(".panel-near a") == "#2 <b id=bold>third</b>"
        assert "Compared with all 3 episodes." in page.inner_text(".panel-near")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('.episode-head h1').textContent === 'train 2'")
        page.focus(".panel-near button")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('.panel-near a')?.textContent === '#0 first'")
