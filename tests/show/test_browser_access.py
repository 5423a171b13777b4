from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from show_fixtures import line, make
from viewing import SHOTS, viewer, watched_page

from chatmill.audit import Audit
from chatmill.load.loader import EpisodeLoader
from chatmill.show.report import BLOCK_SIZES, report_html
from chatmill.show.stats import split_stats

AXE = "axe-core@4.10.3"
FOLDER = SHOTS.parent / AXE
RUN = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => `${each.id}: ${each.nodes.slice(0, 5).map((node) => node.html.slice(0, 200)).join(" | ")}`)"""
VIEWS = {
    "list": "#/episodes?split=train",
    "episode": "#/episodes?split=train&episode=1&token=12",
    "order": "#/order?split=train",
    "audit": "#/audit?split=train&step=1",
    "selection": "#/selection?split=train",
}
READY = {
    "list": ".items li",
    "episode": ".sentence",
    "order": ".positions li",
    "audit": ".step-rows h2",
    "selection": ".selected tbody tr",
}


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core, which npm installs once, outside the tracked files."""
    script = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        if (npm := shutil.which("npm")) is None:
            pytest.skip("npm is not installed; axe-core is an npm package")
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
            command = [npm, "install", "--prefix", folder, "--no-save", "--no-audit", "--no-fund", AXE]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode:
                pytest.skip(f"npm cannot install {AXE}: {done.stderr.strip()[-200:]}")
            if not FOLDER.is_dir():
                # Another process may have installed axe-core first.
                Path(folder).rename(FOLDER)
                Path(folder).mkdir()
    return script.read_text("utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    lines = [line(f"What is {n}? {'x' * 90}", f"It is {n}.", "Sure?", "Yes 👍") for n in range(60)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]
    lines[1] = json.dumps({"messages": messages, "tools": [tool]}) + "\n"
    return make(folder, lines, format="chatml", val_split=0.1, file="a_file_with_a_rather_long_name_of_its_own.jsonl")


@pytest.fixture(scope="module")
def url(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("access-view")
    audit = Audit(folder / "logs", every=2)
    loader = EpisodeLoader(data.path, {"batch_size": 2, "block_size": 512, "epoch_seed": 1}, listener=audit)
    for _ in range(4):
        loader.get_batch()
    loader.close()
    audit.close()
    options = ("--audit", str(folder / "logs"), "--records", str(data.path.parent))
    with viewer(data.path, folder, *options) as url:
        yield url


def open_view(page, url: str, view: str) -> None:
    page.goto(f"{url}{VIEWS['episode']}")
    page.wait_for_selector(".exclude")
    if page.get_attribute(".exclude", "aria-pressed") == "false":
        page.click(".exclude")
    page.goto(f"{url}{VIEWS[view]}")
    page.wait_for_selector(READY[view])
    page.wait_for_selector("#indexing", state="hidden")
    if view == "episode":
        page.click(".panel-near button")
        page.wait_for_selector(".panel-near [role=status] p:last-child")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", sorted(VIEWS))
def test_axe_finds_nothing_serious_in_the_viewer(browser, axe, url, view, scheme):
    with watched_page(browser, color_scheme=scheme) as watched:
        open_view(watched.page, url, view)
        watched.page.evaluate(axe)
        if view == "list":
            watched.page.click(".filter-box summary")
        assert watched.page.evaluate(RUN) == []
        watched.page.set_viewport_size({"width": 390, "height": 844})
        assert watched.page.evaluate(RUN) == []


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_report(browser, axe, data, tmp_path, scheme, width):
    splits = [split_stats(data.dataset[name], name, block_sizes=BLOCK_SIZES) for name in ("train", "val")]
    (tmp_path / "report.html").write_text(report_html(data, splits, version="0"), "utf-8")
    with watched_page(browser, color_scheme=scheme, viewport={"width": width, "height": 844}) as watched:
        watched.page.goto((tmp_path / "report.html").as_uri())
        watched.page.evaluate(axe)
        assert watched.page.evaluate(RUN) == []
        assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_nothing_is_wider_than_a_phone(browser, url, view):
    options = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with watched_page(browser, **options) as watched:
        page = watched.page
        open_view(page, url, view)
        watched.shot(f"phone-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        outside = """() => [...document.querySelectorAll("a, button, input, select, summary")]
          .filter((each) => each.offsetParent && !each.closest(".pill, .skip, .hidden"))
          .filter((each) => { const box = each.getBoundingClientRect(); return box.right > 391 || box.left < -1; })
          .map((each) => each.outerHTML.slice(0, 120))"""
        assert page.evaluate(outside) == []
        if view == "episode":
            page.tap(".t >> nth=3")
            page.wait_for_function("() => /Token 3 of/.test(document.querySelector('.sentence').textContent)")


def test_every_control_is_reached_with_the_tab_key_and_shows_its_focus(browser, url):
    with watched_page(browser) as watched:
        page = watched.page
        open_view(page, url, "episode")
        wanted = page.evaluate(
            """() => { let at = 0;
            for (const each of document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")) {
              const closed = each.closest("details:not([open])");
              if (each.offsetParent && !each.disabled && each.tabIndex >= 0 && (!closed || each.tagName === "SUMMARY"))
                each.dataset.control = at++;
            } return at; }"""
        )
        reached, unseen = set(), []
        page.evaluate("document.activeElement.blur()")
        for _ in range(wanted + 20):
            page.keyboard.press("Tab")
            control, shown, html = page.evaluate(
                """() => { const each = document.activeElement, style = getComputedStyle(each);
                const pill = each.closest(".pill") ? getComputedStyle(each.nextElementSibling) : style;
                return [each.dataset.control, pill.outlineStyle !== "none", each.outerHTML.slice(0, 80)]; }"""
            )
            if control is not None:
                reached.add(int(control))
                unseen += [] if shown else [html]
        assert wanted > 60
        assert sorted(set(range(wanted)) - reached) == []
        assert unseen == []
