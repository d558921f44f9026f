import csv
import html.parser
import io
import itertools
import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from batchwright._charts.page import embed
from batchwright.errors import ArgumentError
from batchwright.lab import observations, report
from batchwright.lab._records import CellKey
from batchwright.lab.observations._effects import LOSS, METRIC
from batchwright.lab.report import LabFolder, read_lab, render_csv, render_html, render_markdown, write_report
from batchwright.lab.report._tables import matrix_effects, row_order
from batchwright.lab.report.folder import expected_runs, progress_of
from batchwright.lab.report.page import leaders, make_view, mean_curve
from batchwright.lab.report.server import SECONDS_BETWEEN_PAGES, LabPages, make_server

from .fabricated import DATASETS, fabricate, fail, make_tuning, older, write_folder

WINE = CellKey("wine", "mlp")
TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture
def folder(tmp_path):
    """A lab with a planted winner and a run that failed."""
    records = fabricate(effects={"exponential": -0.2}, seeds=4)
    records.append(fail(records[-1] | {"seed": 9}))
    return write_folder(tmp_path / "my_lab", records)


class Outline(html.parser.HTMLParser):
    """Counts tags, and keeps headings, addresses and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action")]


def test_the_three_files_are_written(folder):
    files = write_report(folder)
    assert [path.name for path in (files.html, files.markdown, files.csv)] == ["report.html", "report.md", "report.csv"]
    assert all(path.stat().st_size > 1000 for path in (files.html, files.markdown, files.csv))
    assert sorted(path.name for path in folder.iterdir()) == ["report.csv", "report.html", "report.md", "runs.jsonl"]


def test_the_page_asks_for_nothing_from_elsewhere(folder):
    outline = Outline(write_report(folder).html.read_text(encoding="utf-8"))
    assert all(address.startswith(("#", "data:")) for address in outline.addresses)
    assert not {"img", "iframe", "object"} & set(outline.tags)
    assert outline.tags.count("link") == 1  # the empty icon


def test_headings_and_tables_can_be_read_aloud(folder):
    text = write_report(folder).html.read_text(encoding="utf-8")
    tags = Outline(text).tags
    assert tags.count("h1") == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert tags.count("table") == tags.count("caption") > 5
    assert '<html lang="en">' in text
    assert all('scope="' in cell for cell in re.findall("<th [^>]*>|<th>", text))


def test_a_page_stays_small(folder):
    assert write_report(folder).html.stat().st_size < 300_000


def test_the_numbers_of_a_very_large_lab_stay_below_five_megabytes():
    # 12 data sets and models, 30 strategies, 5 seeds, 300 points and 300 decisions each, every reason another one.
    base = fabricate(seeds=1, datasets={"wine": DATASETS["wine"]}, strategies=("constant",))[0]
    curve = [
        base["curve"][-1] | {"examples": place * 10, "validation_loss": 1.2345678 / (place + 1)} for place in range(300)
    ]
    records = [
        base
        | {"dataset": f"d{cell}", "strategy": f"s{name}", "seed": seed, "curve": curve}
        | {
            "decisions": [
                {"examples": k, "old": 1, "new": 2, "reason": f"{cell} {name} {seed} {k} fell"} for k in range(300)
            ]
        }
        for cell in range(12)
        for name in range(30)
        for seed in range(5)
    ]
    lab = read_lab_of(records)
    assert len(embed(make_view(lab))) < 5_000_000


def read_lab_of(records):
    return LabFolder(name="lab", records=tuple(records), plan={})


def test_the_matrix_says_better_worse_and_open_in_signs_and_words(folder):
    records = fabricate(effects={"exponential": -0.2, "linear": 0.2})
    entries = matrix_effects(records, LOSS)
    assert entries[WINE, "exponential"].verdict == "better"
    assert entries[WINE, "linear"].verdict == "worse"
    assert entries[WINE, "cyclical"].verdict == "open"
    page = render_html(read_lab_of(records))
    row = re.search(r'<tr data-group="linear">.*?</tr>', page)[0]
    assert "▼" in row
    assert '<span class="unseen"> worse</span>' in row


def test_a_gain_of_the_metric_is_an_increase():
    # A lower loss is a higher accuracy here: the sign of the change turns, the verdict does not.
    entry = matrix_effects(fabricate(effects={"exponential": -0.2}), METRIC)[WINE, "exponential"]
    assert entry.verdict == "better"
    # The loss falls by 0.2 * 0.3 = 0.06, the accuracy rises by 0.06 / 2.5 = 2.4 points.
    assert re.fullmatch(r"\+2\.[345] pt", entry.text)


def test_one_seed_has_no_interval_and_no_verdict():
    entry = matrix_effects(fabricate(effects={"exponential": -0.2}, seeds=1), LOSS)[WINE, "exponential"]
    assert (entry.verdict, entry.interval) == ("single", "")


def test_rows_stand_in_the_order_of_their_effect():
    records = fabricate(effects={"exponential": -0.3, "entropy": -0.2, "linear": 0.4})
    order = row_order(records)
    assert (order[0], order[1], order[-1]) == ("exponential", "entropy", "linear")
    assert leaders(records) == order[:5]


def test_failed_runs_are_listed_with_their_reason(folder):
    for text in (render_html(read_lab(folder)), render_markdown(read_lab(folder))):
        assert "DoesNotFitError: one example alone runs out of memory" in text


def test_hostile_names_are_text():
    name = "<script>alert(1)</script>&\"'"
    records = fabricate(strategies=("constant", name), datasets={name: DATASETS["wine"]}, seeds=2)
    records += [fail(records[-1] | {"seed": 7}, error=name)]
    page = render_html(read_lab_of(records))
    assert "<script>alert" not in page
    assert page.count("<script") == 2  # the numbers, and the page's own


def test_numbers_that_json_has_no_word_for_are_left_out():
    records = fabricate(strategies=("constant",), seeds=2)
    records[0]["curve"][3]["validation_loss"] = float("nan")
    records[0]["curve"][4]["train_loss"] = float("inf")
    json.loads(embed(make_view(read_lab_of(records))), parse_constant=pytest.fail)


def test_curves_of_seeds_that_were_validated_elsewhere_are_read_off_between_points():
    first = {"curve": [{"examples": n, "validation_loss": 4.0 - n, "batch_size": 8} for n in (0, 2, 4)]}
    other = {
        "curve": [
            {"examples": 0, "validation_loss": 2.0, "batch_size": 8},
            {"examples": 4, "validation_loss": 0.0, "batch_size": 32},
        ]
    }
    curve = mean_curve([first, other])
    # At 2 examples: 2.0 and, halfway between 2 and 0, 1.0; the size is still 8, not between 8 and 32.
    assert curve["loss"] == [3.0, 1.5, 0.0]
    assert (curve["lossLow"][1], curve["lossHigh"][1]) == (1.0, 2.0)
    assert curve["size"] == [8.0, 8.0, 20.0]


def test_the_table_has_one_line_a_run_with_its_change(folder):
    lab = read_lab(folder)
    rows = list(csv.DictReader(io.StringIO(render_csv(lab))))
    assert len(rows) == len(lab.records) == 3 * 9 * 4 + 1
    find = {(row["dataset"], row["strategy"], row["seed"]): row for row in rows}
    base, other = find["wine", "constant", "2"], find["wine", "exponential", "2"]
    ratio = float(other["validation_loss"]) / float(base["validation_loss"])
    assert float(other["loss_change"]) == pytest.approx(ratio - 1)
    assert (base["loss_change"], find["python_functions", "noise_scale", "9"]["status"]) == ("", "failed")


def test_the_markdown_has_matrix_and_tests(folder):
    text = render_markdown(read_lab(folder))
    assert "| exponential | ▲ −" in text  # noqa: RUF001
    # 3 data sets of 4 seeds; 8 strategies on 4 bases: examples, updates, simulated and measured seconds.
    assert "n = 12 pairs; p < 0.001 after Holm over 32 tests" in text
    assert text.startswith(
        "# batchwright lab: my_lab\n\nAfter the same examples, better than a constant batch of 32: exponential, "
    )
    assert "\n\nHow sure: If it made no difference, " in text
    assert "\n### In short\n\nOne strategy ended with a lower validation loss than a constant batch of 32 after" in text
    assert "\nWhy? exponential: likely because the noise of its updates" in text


def test_a_folder_that_is_missing_or_empty_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ArgumentError, match=r"no folder .*; run a lab first: batchwright lab run"):
        read_lab(tmp_path / "nothing")
    with pytest.raises(ArgumentError, match=r"has no runs\.jsonl"):
        read_lab(tmp_path)
    (tmp_path / "runs.jsonl").touch()
    with pytest.raises(ArgumentError, match="no finished run yet"):
        write_report(tmp_path)


def test_a_line_that_is_being_written_waits(folder):
    with (folder / "runs.jsonl").open("a") as file:
        file.write('{"dataset": "wi')
    lab = read_lab(folder)
    assert (len(lab.records), lab.num_unreadable) == (109, 0)


def test_damaged_lines_are_counted_on_the_page(folder):
    lines = (folder / "runs.jsonl").read_text().splitlines()
    (folder / "runs.jsonl").write_text("\n".join(["broken", '{"id": "x", "status": "ok"}', *lines]) + "\n")
    lab = read_lab(folder)
    assert (len(lab.records), lab.num_unreadable) == (109, 2)
    assert "2 lines of runs.jsonl are not records of runs" in render_html(lab)


def test_the_newest_of_two_runs_counts(tmp_path):
    records = fabricate(strategies=("constant",), seeds=1)
    lab = read_lab(write_folder(tmp_path, [fail(records[0]), *records]))
    assert (len(lab.records), lab.num_replaced) == (3, 1)
    assert {run["status"] for run in lab.records} == {"ok"}


def test_how_learning_rates_were_chosen_is_told():
    note = {"dataset": "wine", "model": "mlp", "optimizer": "sgd", "lr": 0.1, "seeds": [1000]}
    scores = [{"lr": rate, "metric": 0.9, "validation_loss": 0.3} for rate in (0.01, 0.1)]
    lab = read_lab_of([older(run) for run in fabricate(seeds=2)])
    page = render_html(type(lab)(name="lab", records=lab.records, plan={"tuning": [note | {"scores": scores}]}))
    assert "0.1 (at the end of the grid)" in page


def test_an_edge_of_the_grid_stands_next_to_the_strategy():
    records = [
        run | {"tuning": make_tuning(0.3)} if (run["dataset"], run["strategy"]) == ("wine", "linear") else run
        for run in fabricate(seeds=2)
    ]
    lab = read_lab_of(records)
    assert matrix_effects(records, LOSS)[WINE, "linear"].rate == "0.3"
    assert matrix_effects(records, LOSS)[WINE, "entropy"].rate == ""
    row = re.search(r'<tr data-group="linear">.*?</tr>', render_html(lab))[0]
    assert row.count("<small>rate at the edge: 0.3</small>") == 1
    assert "; rate at the edge: 0.3 |" in render_markdown(lab)
    (line,) = [line for line in csv.DictReader(io.StringIO(render_csv(lab))) if is_first(line, "wine", "linear")]
    assert (line["rate_at_edge"], line["lr"]) == ("True", "0.1")
    assert "0.3 (edge of the grid)" in render_html(lab)


def is_first(line, dataset, strategy):
    return (line["dataset"], line["strategy"], line["seed"]) == (dataset, strategy, "0")


def test_a_strategy_whose_tuning_failed_says_so_on_the_page():
    records = [
        fail(run, "no rate of the grid ended with a finite loss") | {"tuning": make_tuning(None)}
        if run["strategy"] == "entropy"
        else run
        for run in fabricate(seeds=2)
    ]
    page = render_html(read_lab_of(records))
    assert "tuning failed" in page
    assert "Tuning failed, so there is no result: entropy on digits · mlp, entropy on python_functions" in page


def test_the_table_of_runs_has_the_changes_on_every_basis():
    # Twice the batch: half of the updates. 12 parts of 1,024 examples are 32 updates of 32 and 16 of 64.
    records = fabricate(
        strategies=("constant", "linear"), sizes={"linear": 64}, seeds=2, num_examples=12_288, noise=0.0
    )
    rows = list(csv.DictReader(io.StringIO(render_csv(read_lab_of(records)))))
    (line,) = [row for row in rows if is_first(row, "wine", "linear")]
    half = records[0]["curve"][6]["validation_loss"]
    assert float(line["loss_change"]) == 0
    assert float(line["loss_updates_change"]) == pytest.approx(0.3 / half - 1)
    # 192 updates of 2 ms and 12,288 examples of 0.02 ms.
    assert float(line["simulated_seconds"]) == pytest.approx(0.384 + 0.2458, abs=1e-4)


def test_no_interval_mixes_percent_and_factors():
    # Losses from a little above the baseline's to five times it.
    records = fabricate(effects={"linear": lambda name, _: 4.0 if name == "wine" else 0.1}, noise=0.4, seeds=3)
    text = render_markdown(read_lab_of(records))
    number = rf"(?:{TIMES}|[+−±])[\d.,]+"  # noqa: RUF001
    found = re.findall(rf"({number})( %)? \((?:95 % interval )?({number})( %)? to ({number})( %)?", text)
    assert len(found) > 50
    kinds = [{TIMES if TIMES in figure else "%" for figure in (mean, low, high)} for mean, _, low, _, high, _ in found]
    assert {TIMES} in kinds
    assert all(len(kind) == 1 for kind in kinds)


def test_older_records_still_make_a_report_that_says_what_is_missing():
    lab = read_lab_of([older(run) for run in fabricate(seeds=2)])
    text, page = render_markdown(lab), render_html(lab)
    assert "cannot be compared. Left out: all 48 pairs of runs (their records hold no simulated seconds)." in text
    assert "The records do not say how the learning rate of each strategy was chosen" in text
    assert 'value="updates" data-state="x"' in page
    assert 'value="simulated" data-state="x"' not in page


def plan_of(names, seeds, *datasets):
    cells = [{"dataset": name, "model": "mlp", "num_epochs": 2} for name in datasets]
    return {"plan": {"cells": cells, "strategies": names, "seeds": seeds}}


def test_progress_counts_the_runs_of_the_plan():
    lab = read_lab_of(fabricate(strategies=("constant",), seeds=2, datasets={"wine": DATASETS["wine"]}))
    planned = type(lab)(
        name="lab", records=lab.records, plan=plan_of(["constant", "noise", "replay_noise"], [0, 1], "wine")
    )
    assert expected_runs(planned) == 6
    assert progress_of(planned).text == "2 of 6 runs so far; this page follows the lab."
    assert progress_of(lab).text == ""


def test_progress_knows_what_a_regression_and_a_single_seed_leave_out():
    records = fabricate(
        strategies=("constant",), seeds=1, datasets={"diabetes": {"num_classes": None, "kind": "tabular"}}
    )
    lab = read_lab_of(records)
    names = ["constant", "entropy", "noise", "replay_noise"]
    # entropy needs classes, and a replay another seed.
    assert expected_runs(type(lab)(name="lab", records=lab.records, plan=plan_of(names, [0], "diabetes"))) == 2


def fetch(server, path, host=None):
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}")
    if host:
        request.add_header("Host", host)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture
def server(folder):
    with make_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_served_page_says_where_to_ask_for_news(server):
    page = fetch(server, "/")
    state = json.loads(fetch(server, "/state"))
    assert 'data-live="state"' in page
    assert f'data-stamp="{state["stamp"]}"' in page
    assert fetch(server, "/report.md").startswith("# batchwright lab")
    assert fetch(server, "/report.csv").startswith("dataset,model")


@pytest.mark.parametrize("path", ["/runs.jsonl", "/../runs.jsonl", "/report.html"])
def test_no_other_address_is_answered(server, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(server, path)


def test_a_page_from_elsewhere_is_refused(server):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetch(server, "/state", host="evil.example:80")


def test_the_server_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_refused_with_the_way_out(server, folder):
    with pytest.raises(ArgumentError, match="leave out --port"):
        make_server(folder, port=server.server_port)


def test_pages_follow_the_runs_but_not_too_often(folder):
    now = [0.0]
    pages = LabPages(folder, clock=lambda: now[0])
    first = pages.state()["stamp"]
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps(fabricate(seeds=1)[0] | {"seed": 77}) + "\n")
    now[0] = SECONDS_BETWEEN_PAGES - 1
    assert pages.state()["stamp"] == first
    now[0] += 1
    assert pages.state()["stamp"] != first
    assert "<b>110</b>runs" in pages.page()


def test_a_lab_without_a_run_yet_has_a_page_that_waits(tmp_path):
    (tmp_path / "lab.json").write_text("{}")
    assert "No run of this lab has ended yet. This" in LabPages(tmp_path).page()
    (tmp_path / "lab.json").write_text(json.dumps(plan_of(["constant", "linear"], [0, 1, 2], "wine")))
    assert "No run of this lab has ended yet: 0 of 6. This" in LabPages(tmp_path).page()
    (tmp_path / "tuning.jsonl").write_text("{}\n{}\n{")  # the third is being written
    assert "0 of 6. Learning rates are chosen first: 2 runs so far. This" in LabPages(tmp_path).page()


def test_the_time_left_is_that_of_the_pace_so_far(tmp_path):
    now = [100.0]
    records = fabricate(strategies=("constant", "linear"), seeds=5, datasets={"wine": DATASETS["wine"]})
    plan = plan_of(["constant", "linear"], [0, 1, 2, 3, 4], "wine")
    pages = LabPages(write_folder(tmp_path, records[:2], plan=plan), clock=lambda: now[0])
    state = pages.state()
    assert (state["text"], state["done"]) == ("2 of 10 runs so far; this page follows the lab.", 2)
    # Two runs in 400 seconds, so 6 more take 1,200; after 300 of these the page says 900.
    write_folder(tmp_path, records[:4])
    now[0] += 400
    assert pages.state()["text"] == "4 of 10 runs so far, about 20 minutes left; this page follows the lab."
    now[0] += 300
    assert "about 15 minutes left" in pages.state()["text"]
    write_folder(tmp_path, records)
    assert (pages.state()["text"], pages.state()["expected"]) == ("", None)


def test_names_that_stand_twice_are_kept_under_both():
    assert report.Lab is LabFolder
    assert observations.Observation is observations.Finding


def test_a_run_without_a_result_has_a_reason_in_every_format():
    records = fabricate(strategies=("constant", "linear"), seeds=2)
    records[0] = records[0] | {"final": records[0]["final"] | {"validation_loss": None}}
    records[1] = records[1] | {"status": "failed", "error": None}
    records[2] = records[2] | {"status": "failed", "error": "first line\nsecond line"}
    lab = read_lab_of(records)
    for text in (render_html(lab), render_markdown(lab)):
        assert "diverged: the loss is not a finite number" in text
        assert "no reason given" in text
    assert "seed 0: first line second line" in render_markdown(lab)


def test_names_make_no_markup_in_the_markdown():
    records = [one | {"dataset": "<img src=x>*a*[b](c)|`d`"} for one in fabricate(strategies=("constant", "linear"))]
    text = render_markdown(read_lab_of(records))
    assert "<img" not in text
    assert "&lt;img src=x>\\*a\\*\\[b\\](c)\\|\\`d\\`" in text
    assert "p < 0.001" in text or "p = " in text
