from __future__ import annotations

import random
from importlib import resources

import pytest
from show_fixtures import HOSTILE, line, make

from chatmill.show.charts import Link, Node, flow, lines
from chatmill.show.report import BLOCK_SIZES, report_html
from chatmill.show.stats import split_stats

OVERLAPS = """() => {
  const overlaps = [];
  for (const chart of document.querySelectorAll("svg[role=img]")) {
    const texts = [...chart.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect()]);
    const nodes = [...chart.querySelectorAll("rect[rx]")].map((node) => ["a node", node.getBoundingClientRect()]);
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    texts.forEach(([text, box], at) => {
      for (const [other, its] of [...texts.slice(at + 1), ...nodes]) {
        if (!apart(box, its)) overlaps.push(`${chart.getAttribute("aria-label")}: "${text}" and "${other}"`);
      }
    });
  }
  return overlaps;
}"""
NAMES = [
    "W" * 80,
    "mixed case WITH spaces " * 4,
    "词" * 40,
    "👩\u200d👧" * 30,
    "dropped: last exchange over max tokens",
    "x",
    "ﷺ" * 20,
]


def write_page(folder, shown) -> str:
    names = [name for name in shown.dataset.splits if len(shown.dataset[name])]
    splits = [split_stats(shown.dataset[name], name, block_sizes=BLOCK_SIZES) for name in names]
    (folder / "report.html").write_text(report_html(shown, splits, version="0"), "utf-8")
    return (folder / "report.html").as_uri()


def flow_of(seed: int) -> str:
    numbers = random.Random(seed)
    columns = [
        [
            Node(numbers.choice(NAMES), 10 ** numbers.randrange(13), unit, numbers.choice(["came", "lost", "added"]))
            for _ in range(numbers.choice([1, 2, 9, 30]))
        ]
        for unit in ("records", "records", "tokens", "tokens", "tokens")
    ]
    links = [Link(at, 0, 1, len(columns[at + 1]) - 1, 1) for at in range(len(columns) - 1)]
    return flow(columns, links, title=f"flow {seed}")


@pytest.mark.parametrize("width", [1440, 390])
def test_labels_of_the_charts_never_overlap(watched, tmp_path, width):
    numbers = random.Random(0)
    fills = [
        [("a", "packed", one), ("b", "alone", other)]
        for one, other in [
            ([0.0] * 7, [0.0] * 7),
            ([1.0] * 7, [1.0] * 7),
            ([at / 6 for at in range(7)], [1 - at / 6 for at in range(7)]),
            *(([numbers.random() for _ in range(7)], [numbers.random() for _ in range(7)]) for _ in range(20)),
        ]
    ]
    labels = [f"{size:,}" for size in BLOCK_SIZES]
    charts = [flow_of(seed) for seed in range(12)] + [lines(each, labels, title="fill", x_label="x") for each in fills]
    style = (resources.files("chatmill.show") / "report.css").read_text("utf-8")
    body = "".join(f"<figure class=flow>{chart}</figure>" for chart in charts)
    (tmp_path / "charts.html").write_text(f"<meta charset=utf-8><style>{style}</style>{body}", "utf-8")
    watched.page.set_viewport_size({"width": width, "height": 900})
    watched.page.goto((tmp_path / "charts.html").as_uri())
    assert watched.page.locator("svg text").count() > 1000
    assert watched.page.evaluate(OVERLAPS) == []


def test_labels_of_a_report_of_rejected_cut_and_packed_records_never_overlap(watched, tmp_path):
    bad = [
        "{\n",
        "[]\n",
        '{"messages": 1}\n',
        '{"messages": [{"role": "bot", "content": "x"}]}\n',
        '{"messages": []}\n',
    ]
    good = [line("q" * (n % 90), "a" * (n * n % 3000), "more?", "yes") for n in range(300)]
    shown = make(
        tmp_path, [*good, *bad], max_tokens=200, fit="turns", on_error="skip", pack=400, val_split=0.1, dedupe=True
    )
    watched.page.goto(write_page(tmp_path, shown))
    assert watched.page.locator("#flow text").count() > 20
    assert watched.page.evaluate(OVERLAPS) == []
    watched.shot("report-flow")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_opens_without_a_request_and_is_used_by_keyboard(watched, hostile, tmp_path, scheme):
    page, url = watched.page, write_page(tmp_path, hostile)
    page.emulate_media(color_scheme=scheme)
    page.goto(url)
    assert watched.requests == [url]
    assert page.evaluate(OVERLAPS) == []
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
