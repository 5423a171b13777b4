from __future__ import annotations

import importlib
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
GOLDEN = HERE / "golden_page.md"
SVG = "{http://www.w3.org/2000/svg}"


def modules(*names):
    """Import modules of benchmarks/, which is not a package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))


bench, chart, flame, gpu, lines, page, targets, profiles, train_lines, train_report = modules(
    "bench", "chart", "flame", "gpu", "lines", "page", "targets", "profiles", "train_lines", "train_report"
)


@pytest.fixture
def run():
    return json.loads((HERE / "small_run.json").read_text("utf-8"))


def row(text, start):
    found = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    assert len(found) == 1, found
    return found[0]


# The page.


def test_the_page_equals_the_golden_page(run):
    assert page.page(run) == GOLDEN.read_text("utf-8")


def test_a_row_shows_both_libraries_the_floor_the_speedup_and_both_memory_peaks(run):
    run["prepare"] |= {
        "conversations": 50_000,
        "seconds": 2.0,
        "bare": {"decode": 0.25, "encode": 0.5, "write": 0.25},
        "share_of_bare": 0.5,
        "memory": {"chatmill": 500_000_000},
    }
    run["prepare"]["peers"]["trl"] |= {"seconds": 104.0, "times": 52.0, "memory": 2_000_000_000}
    assert row(page.page(run), "prepare and pack 50,000 conversations |") == (
        "| prepare and pack 50,000 conversations | 2.00 s | only decoding, encoding and writing, 1.00 s | 0.50 "
        "| TRL 1.16.0, 104 s | 52.0 | 500 MB / 2,000 MB |"
    )


def test_where_a_peer_is_faster_the_page_says_so_at_the_top_and_in_the_line(run):
    text = page.page(run)
    assert "A peer is faster at these tasks: pack 0.5 million tokens." in " ".join(text.split())
    assert "less memory" not in text
    assert "| 0.80: the peer is faster |" in row(text, "pack 0.5 million tokens")
    run["pack"]["order"]["figures"]["times_torchtune"] = 1.5
    assert "faster" not in page.page(run).replace("as fast", "")


def test_where_a_peer_uses_less_memory_the_page_says_so(run):
    run["prepare"]["peers"]["trl"]["memory"] = 2_000_000
    run["prepare"]["memory"] = {"chatmill": 2_000_001}
    assert "A peer uses less memory for these tasks: prepare and pack 2,000 conversations." in " ".join(
        page.page(run).split()
    )
    run["prepare"]["memory"] = {"chatmill": 1_999_999}
    assert "less memory" not in page.page(run)


def test_rows_that_differ_from_a_peer_are_counted_and_explained(run):
    run["prepare"]["peers"]["trl"]["differ"] = {
        "alike": 90,
        "chatmill_alone": 10,
        "peer_alone": 10,
        "peer_alone_cut": 10,
    }
    assert (
        "90 of the resulting conversations have the same ids and mask as chatmill's, and 10 differ: they have more"
        in " ".join(page.page(run).split())
    )
    run["prepare"]["peers"]["trl"]["differ"]["peer_alone_cut"] = 9
    assert (
        "90 of the resulting conversations have the same ids and mask as chatmill's, and 10 differ. The fastest"
        in " ".join(page.page(run).split())
    )


def test_differences_from_the_peer_are_counted(run):
    agreement = "ids and loss masks of both are equal in all 100 conversations."
    assert agreement in " ".join(page.page(run).split())
    run["render"]["differ"] |= {"ids_differ": 3, "masks_differ": 2}
    run["load"]["shapes"][1]["compared"]["differ"] = 5
    text = " ".join(page.page(run).split())
    assert agreement not in text
    assert "ids differ in 3 of 100 conversations. Among the other conversations, the loss masks differ in 2 of" in text
    assert "with those of the peer; 0 and 5 of them differ." in text


def test_preparing_with_a_chat_template_is_compared_with_trl_and_has_a_target(run):
    peer = run["prepare_template"]["peers"]["trl"]
    peer |= {"times": 9.9, "differ": {**peer["differ"], "alike": 7, "peer_alone": 0}}
    text = page.page(run)
    assert row(text, "prepare and pack 2,000 conversations with `qwen2_5` |").count("TRL 1.16.0, 9.40 s | 9.90") == 1
    assert "With this template, 7 conversations have the same ids as chatmill's, and 0 differ." in " ".join(
        text.split()
    )
    assert "60 times | 9.9 times | **missed** |" in row(text, "preparing with a chat template: speedup over TRL")
    del run["prepare"]
    assert "`benchmarks/prepare.py --format template`" in page.page(run)


def test_parts_without_results_have_no_section_and_do_not_count(run):
    few = {"gpu": run["gpu"], "render": run["render"]}
    text = page.page(few)
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Targets", "Rendering", "Training"]
    assert (
        row(text, "preparing: speedup over TRL")
        == "| preparing: speedup over TRL | at least 60 times |  | not measured |"
    )
    assert "6 of 8 targets are met" in text


def test_headings_that_other_pages_link_to_are_there(run):
    headings = re.findall(r"^## (.*)", page.page(run), re.MULTILINE)
    assert {"Loading", "Training"} <= set(headings)


def test_the_page_names_the_users_own_data(run):
    run["data"]["own"] = ["input", "tokenizer"]
    assert "2,000 conversations (6 MB), with the user's own input and tokenizer." in " ".join(page.page(run).split())


def test_code_and_links_are_never_broken_across_lines(run):
    for block in page.page(run).split("\n\n"):
        for line in block.splitlines():
            assert line.count("`") % 2 == 0, line
            assert line.count("[") == line.count("]"), line


# Targets.


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.75, "| 0.75 | met |"),
        (0.749, "| 0.75 | **missed** |"),
        (0.8, "| 0.80 | met |"),
        (0.3, "| 0.30 | **missed** |"),
    ],
)
def test_a_lower_limit_is_met_at_its_value_and_missed_below_it(run, share, shown):
    run["render"]["share_of_encoding"] = share
    assert row(targets.target_table(run), "rendering on all cores: speed relative") == (
        f"| rendering on all cores: speed relative to tokenization alone | at least 0.75 {shown}"
    )


@pytest.mark.parametrize(
    ("peak", "shown"), [(1.2e9, "1,200 MB | met |"), (1.201e9, "1,201 MB | **missed** |"), (5e8, "500 MB | met |")]
)
def test_an_upper_limit_is_met_at_its_value_and_missed_above_it(run, peak, shown):
    run["prepare"]["memory"]["chatmill"] = peak
    assert row(targets.target_table(run), "preparing: peak memory of all") == (
        f"| preparing: peak memory of all processes | at most 1,200 MB | {shown}"
    )


def test_every_target_has_a_measured_value_and_missed_targets_are_named(run):
    figures = {"tokens_per_s": 1.0, "gib": 1.0}
    more = ("4b-own-adamw", "4b-own-adamw_bf16", "4b-own-adamw8bit", "8b-hf-lora", "8b-hf-qlora", "8b-hf-qlora-offload")
    measured = run | {"gpu": run["gpu"] | dict.fromkeys(more, figures)}
    assert [target.what for target in targets.TARGETS if target.held(measured) is None] == []
    assert targets.missed(run) == [
        "rendering on all cores: speed relative to tokenization alone",
        "chat templates: speedup over transformers",
        "packing: speedup over TRL",
        "preparing: speedup over TRL",
        "preparing with a chat template: speedup over TRL",
        "preparing with a chat template: time relative to ChatML",
        "preparing: speed relative to the floor",
        "preparing ten times the data: peak memory relative to the original data",
        "loading packed batches of (16, 4096): slowdown with an audit log",
        "loading from a bucket, cold cache: share of the bandwidth (100 MB/s) used over a shuffled epoch",
        "training a 0.6B model: tokens per second (padding not counted), stretch goal",
        "building rollout targets: number per second on one core",
    ]


def test_a_target_without_a_result_keeps_its_row_from_the_earlier_page(run):
    earlier = page.page(run)
    del run["cores"]
    row = "| preparing on 16 cores: speedup over two cores | at least 5 times |"
    (measured,) = [line for line in earlier.splitlines() if line.startswith(row)]
    assert measured in page.page(run, earlier).splitlines()
    assert f"{row}  | not measured |" in page.page(run).splitlines()


def test_a_search_that_finds_nothing_misses_its_target(run):
    run["view"]["found"] = False
    assert "viewer with a million episodes: time to find the first match" in targets.missed(run)


def test_saving_memory_at_too_low_a_speed_misses_the_target(run):
    line = {"tokens_per_s": 20_000.0, "gib": 64.0}
    run["gpu"] |= {"4b-own-adamw": line, "4b-own-adamw_bf16": line | {"gib": 36.1}}
    run["gpu"]["4b-own-adamw8bit"] = {"tokens_per_s": 17_900.0, "gib": 30.0}
    start = "training a 4B model in 36 GiB"
    assert row(targets.target_table(run), start).endswith("| at least 0.9 | 0.90 | **missed** |")
    run["gpu"]["4b-own-adamw_bf16"]["gib"] = 36.0
    assert row(targets.target_table(run), start).endswith("| at least 0.9 | 1.00 | met |")


# Figures.


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (123.4, "123 s"),
        (12.34, "12.3 s"),
        (1.234, "1.23 s"),
        (0.1234, "123 ms"),
        (0.0123, "12.3 ms"),
        (4.5e-7, "0.45 µs"),
    ],
)
def test_a_time_is_shown_with_three_digits_in_its_unit(value, shown):
    assert lines.seconds(value) == shown


# Training.


def test_updating_the_training_section_equals_regenerating_the_page(run):
    old = page.page(run)
    gpu_now = {name: one for name, one in run["gpu"].items() if name != "0.6b-usual-padded"}
    gpu_now["0.6b-own-adamw"] = gpu_now["0.6b-own-adamw"] | {"tokens_per_s": 140_000.0, "gib": 61.0}
    new = page.page(run | {"gpu": gpu_now})
    assert "| 61.0 GiB | **missed** |" in row(new, "training a 0.6B model: GPU memory")
    assert page.with_training(old, gpu_now) == new
    assert page.with_training(new, run["gpu"]) == old


def test_the_page_explains_missed_targets(run):
    item = "- *preparing with a chat template: time relative to ChatML*: "
    for times, wanted in ((1.3, 0), (1.31, 1)):
        run["prepare_template"]["seconds"] = times * run["prepare_template"]["with_chatml"]
        text = page.page(run)
        assert (text.count(item), page.with_training(text, run["gpu"])) == (wanted, text)
    assert text.index(item) < text.index("## Rendering")


def test_the_last_result_of_a_configuration_counts_and_unknown_ones_are_ignored(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text('{"line": "4b-own-adamw", "gib": 1}\n{"line": "0.6b-own-adamw", "gib": 2}\n{"line": "gone"}\n')
    second.write_text('{"line": "0.6b-own-adamw", "gib": 3}\n')
    found = train_report.read_results([first, second, tmp_path / "none"])
    assert found == {
        "0.6b-own-adamw": {"line": "0.6b-own-adamw", "gib": 3},
        "4b-own-adamw": {"line": "4b-own-adamw", "gib": 1},
    }
    assert list(found) == ["0.6b-own-adamw", "4b-own-adamw"]


def test_one_command_stores_results_and_updates_the_page(run, tmp_path, monkeypatch, capsys):
    kept, docs, found = (tmp_path / name for name in ("gpu.json", "page.md", "found"))
    kept.write_text(json.dumps(run["gpu"]))
    docs.write_text(page.page(run))
    new = run["gpu"]["0.6b-own-adamw"] | {"tokens_per_s": 140_000.0}
    found.write_text(json.dumps(new) + "\n")
    for name, value in (("GPU", kept), ("PAGE", docs)):
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr("sys.argv", ["gpu.py", str(found)])
    assert gpu.main() == 0
    now = run["gpu"] | {"0.6b-own-adamw": new}
    assert json.loads(kept.read_text()) == now
    assert docs.read_text() == page.page(run | {"gpu": now})
    monkeypatch.setattr("sys.argv", ["gpu.py", str(tmp_path / "none")])
    assert gpu.main() == 2
    assert "python benchmarks/gpu.py FILE" in capsys.readouterr().err


def test_configurations_are_compared_only_with_peers_of_the_same_model_and_precision():
    lines_of = train_lines.TRAIN_LINES
    compared = {(ours.name, peer.name) for ours, peer in train_report.pairs({name: {} for name in lines_of})}
    assert ("4b-own-adamw", "4b-peer-fp32") in compared
    assert ("8b-hf-lora", "8b-peer-lora-compiled") in compared
    for ours, peer in compared:
        assert lines_of[ours].precision == lines_of[peer].precision, (ours, peer)
        assert lines_of[ours].model == lines_of[peer].model, (ours, peer)
        assert (lines_of[ours].side, lines_of[peer].side) == ("chatmill", "peer")
    alone = {name for name, line in lines_of.items() if line.side == "chatmill"} - {ours for ours, _ in compared}
    assert all(any(part in name for part in ("fp8", "offload", "8bit", "150m")) for name in alone), alone


def test_a_target_is_missed_if_a_peer_at_equal_precision_is_faster_or_uses_less_memory(run):
    found = {name: run["gpu"][name] for name in ("0.6b-own-adamw", "0.6b-peer-fp32", "8b-peer-qlora-compiled")}
    held = dict(train_report.targets(found))
    assert held["0.6b-own-adamw: no slower than 0.6b-peer-fp32"]
    assert held["0.6b-own-adamw: uses no more memory than 0.6b-peer-fp32"]
    assert not held["0.6B model, float32 master weights: at least 135,000 tokens/s (padding not counted)"]
    found["0.6b-peer-fp32"] = found["0.6b-peer-fp32"] | {"tokens_per_s": 121_166, "gib": 51.1}
    held = dict(train_report.targets(found))
    assert not held["0.6b-own-adamw: no slower than 0.6b-peer-fp32"]
    assert not held["0.6b-own-adamw: uses no more memory than 0.6b-peer-fp32"]


def test_configurations_are_selected_by_name_or_prefix():
    names = list(train_lines.TRAIN_LINES)
    assert [line.name for line in train_lines.chosen(None)] == names
    for name in names:
        assert [line.name for line in train_lines.chosen([name])] == [name]
    assert {line.model for line in train_lines.chosen(["8b", "0.6b-peer-bf16"])} == {"8b", "0.6b"}
    assert train_lines.chosen(["9b"]) == []


# Pictures.


def test_a_bar_is_as_long_as_the_logarithm_of_its_ratio(run):
    root = ElementTree.fromstring(chart.chart(run))
    bars = [(float(bar.get("width")), bar.get("class")) for bar in root.iter(f"{SVG}rect")]
    times = [line.times for line in lines.lines(run) if line.times is not None]
    scale = bars[0][0] / math.log10(times[0])
    for (width, kind), ratio in zip(bars, times, strict=False):
        assert width == pytest.approx(max(1, scale * abs(math.log10(ratio))), abs=0.3)
        assert kind == ("faster" if ratio >= 1 else "slower")
    assert len(bars) == len(times) + 3


def test_a_flame_graph_nests_calls_and_escapes_names():
    text = flame.flame_graph("a < b", {"f (chatmill/x.py:1);<g> (y.py:2)": 3, "f (chatmill/x.py:1)": 1})
    boxes = {
        group.find(f"{SVG}title").text: group.find(f"{SVG}rect")
        for group in ElementTree.fromstring(text).iter(f"{SVG}g")
    }
    assert list(boxes) == ["f (chatmill/x.py:1): 100.0%", "<g> (y.py:2): 75.0%"]
    outer, inner = boxes.values()
    assert float(inner.get("width")) == pytest.approx(0.75 * float(outer.get("width")))
    assert float(inner.get("y")) < float(outer.get("y"))
    assert (outer.get("class")[:3], inner.get("class")) == ("own", "other")


def test_the_hottest_functions_are_counted_once_per_stack():
    stacks = {"f;g;f": 3, "f;h": 1}
    assert flame.hottest(stacks) == [("f", 0.75, 1.0), ("h", 0.25, 0.25)]


def test_stacks_start_at_the_profiled_function_and_imports_are_merged():
    raw = "\n".join(
        [
            "main (/r/benchmarks/x.py:1);Job.run_unit (/r/src/chatmill/unit.py:2);f (/v/lib/python3.11/os.py:3) 4",
            "main (/r/benchmarks/x.py:1);prepare (/r/src/chatmill/pipeline.py:9) 2",
            "main (/r/benchmarks/x.py:1);start_up (/r/src/chatmill/a.py:2) 7",
            "prepare (/r/src/chatmill/p.py:9);_find_and_load (<frozen x>:1);g (/v/site-packages/n/a.py:1) 1",
        ]
    )
    assert profiles.below_roots(raw, ("run_unit", "prepare")) == {
        "Job.run_unit (chatmill/unit.py:2);f (os.py:3)": 4,
        "prepare (chatmill/pipeline.py:9)": 2,
        "prepare (chatmill/p.py:9);import": 1,
    }


# The command.


def test_the_page_chart_and_flame_graphs_are_written_from_a_folder_of_results(run, tmp_path):
    for name, found in run.items():
        if name != "gpu":
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
    out = tmp_path / "out"
    out.mkdir()
    written = bench.write(bench.read(tmp_path), out, whole=True)
    assert [path.name for path in written] == [
        "benchmarks.md",
        "benchmarks.svg",
        "flame-prepare.svg",
        "flame-load.svg",
        "flame-template.svg",
    ]
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (out / "benchmarks.md").read_text("utf-8"))
    assert sorted(shown) == sorted(path.name for path in written[1:])
    for path in written[1:]:
        ElementTree.fromstring(path.read_text("utf-8"))


def test_a_page_is_not_overwritten_with_incomplete_results(run, tmp_path, monkeypatch, capsys):
    results, docs = tmp_path / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir()
    (results / "profiles.json").write_text(json.dumps(run["profiles"]))
    (docs / "benchmarks.md").write_text("as it was")
    for name, folder in (("RESULTS", results), ("DOCS", docs), ("DATA", tmp_path / "data")):
        monkeypatch.setattr(bench, name, folder)
    monkeypatch.setattr("sys.argv", ["bench.py", "--page"])
    bench.main()
    assert (docs / "benchmarks.md").read_text() == "as it was"
    assert sorted(path.name for path in docs.glob("*.svg")) == [
        "flame-load.svg",
        "flame-prepare.svg",
        "flame-template.svg",
    ]
    assert "the page is not written: run the missing benchmarks data, render," in capsys.readouterr().err


def test_the_script_of_every_step_exists():
    assert [step.name for step in bench.STEPS if not (BENCHMARKS / step.script).is_file()] == []
    assert {name for names, _, _ in page.SECTIONS for name in names} <= {step.name for step in bench.STEPS}
