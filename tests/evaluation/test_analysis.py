"""The whole analysis and its report on made-up records."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from moopd.config import Scale, StatisticsConfig, load_scale
from moopd.data.manifest import write_questions
from moopd.evaluation.analysis import RecordsInput, analyse, curve_points
from moopd.evaluation.records import RecordsError, to_table, write_records
from moopd.evaluation.report import ReportPaths, write_report
from moopd.evaluation.results import Provenance, Results, RunProvenance, read_results
from moopd.evaluation.score import load_questions, score_files
from moopd.systems import load_systems
from moopd.types import EvalRecord, Question
from tests.evaluation import made

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = load_systems(ROOT / "configs" / "systems.yaml")
QUESTIONS = made.questions(6)
FEW = StatisticsConfig(num_draws=400, num_cases=6)
NASTY = '</script><script>alert(1)</script><img src="x" onerror="alert(2)"> $x_{'


def tiny() -> Scale:
    return load_scale(ROOT / "configs" / "scale" / "tiny.yaml")


def given(system: str, run: int = 0, questions: list[Question] | None = None) -> RecordsInput:
    records = made.records(system, QUESTIONS if questions is None else questions, run)
    return RecordsInput(to_table(records), RunProvenance(records=f"digest-{system}-{run}"))


def results_of(
    runs: tuple[int, ...] = (0,), systems: tuple[str, ...] = tuple(made.SKILLS)
) -> Results:
    history = [{"step": 0.0, "dev/em": 0.2, "dev/no_search": 0.1, "train/em": 0.5},
               {"step": 20.0, "dev/em": 0.3, "dev/no_search": 0.9}]  # fmt: skip
    return analyse(
        [given(system, run) for system in systems for run in runs],
        QUESTIONS,
        SYSTEMS,
        FEW,
        scale=tiny(),
        provenance=Provenance(config="c" * 64, manifest="m" * 64),
        curves=[p for run in runs for p in curve_points("multiagent_opd", run, history)],
    )


@pytest.fixture(scope="module")
def single() -> Results:
    return results_of()


@pytest.fixture(scope="module")
def several() -> Results:
    return results_of((0, 1, 2), ("cmas_base", "cmas_rl", "multiagent_opd"))


def test_rows_stand_in_the_papers_order(single: Results) -> None:
    assert [system.name for system in single.systems] == list(made.SKILLS)
    last = single.system("multiagent_opd_last")
    assert last.title == "MultiAgent-OPD (last step)"
    assert last.reported.avg_at_4 is None  # the paper has no number for it
    assert single.system("cmas_base").reported.avg_at_4 == 25.09


def test_scores_are_those_of_the_records(single: Results) -> None:
    records = made.records("cmas_rl", QUESTIONS)
    golds = {question.id: question.answers[0] for question in QUESTIONS}
    right = dict.fromkeys(single.sets, 0)
    for record in records:
        right[record.dataset] += record.output == f"<answer>{golds[record.question_id]}</answer>"
    scores = single.system("cmas_rl").strict["avg"]
    by_hand = {name: 100 * right[name] / 24 for name in single.sets}
    assert {name: one.value for name, one in scores.sets.items()} == pytest.approx(by_hand)
    assert scores.macro.value == pytest.approx(sum(by_hand.values()) / 7)


def test_ablations_are_compared_at_the_last_step(single: Results) -> None:
    pairs = {(d.first, d.second) for d in single.differences_of("avg", "ablation")}
    assert pairs == {
        ("multiagent_opd_last", name)
        for name in ("opd_outcome_searcher", "opd_base_teacher", "opd_no_searcher_loss")
    }
    main = {(d.first, d.second): d for d in single.differences_of("avg", "main")}
    assert {second for _, second in main} == {
        "cmas_base", "cmas_rl", "hmas_base", "prompted_critic"
    }  # fmt: skip
    paper = main["multiagent_opd", "prompted_critic"].reported
    assert paper is not None and (paper.value, paper.low, paper.high) == (4.06, 2.98, 5.12)
    # Every pair once: 9 rows, 36 pairs.
    assert len({frozenset((d.first, d.second)) for d in single.differences_of("avg")}) == 36


def test_difference_is_the_difference_of_scores(single: Results) -> None:
    for difference in single.differences_of("pass"):
        first = single.system(difference.first).strict["pass"].macro.value
        second = single.system(difference.second).strict["pass"].macro.value
        assert difference.macro.value == pytest.approx(first - second, abs=1e-9)
        assert difference.num_wins == sum(one.value > 0 for one in difference.sets.values())


def test_one_run_says_nothing_of_runs(single: Results, several: Results) -> None:
    assert all(d.over_runs is None and d.survives_runs is None for d in single.differences)
    assert all(system.run_spread is None for system in single.systems)
    row = several.system("multiagent_opd")
    values = list(row.run_avg.values())
    mean = sum(values) / 3
    spread = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert row.run_spread == pytest.approx(spread)
    assert row.strict["avg"].macro.value == pytest.approx(mean)
    assert row.over_runs is not None
    assert row.over_runs.high - row.over_runs.low > 0
    assert all(d.survives_runs is not None for d in several.differences)


def test_workload_is_the_mean_of_the_runs(several: Results) -> None:
    row = several.system("cmas_rl")
    searches = [
        sum(record.num_searches for record in made.records("cmas_rl", QUESTIONS, run)) / (7 * 6 * 4)
        for run in (0, 1, 2)
    ]
    # Sets are of one size here, so their equal weight is that of all workflows.
    assert row.workload["searches"].macro.value == pytest.approx(sum(searches) / 3)
    assert row.budgets["searches"][-1].share.value == pytest.approx(row.strict["avg"].macro.value)


def test_runs_on_their_own_questions(several: Results) -> None:
    """Fresh test questions per run: nothing is shared but the sets."""
    worlds = {run: [replace(q, id=f"{run}-{q.id}") for q in QUESTIONS] for run in (0, 1)}
    found = analyse(
        [given(s, run, worlds[run]) for s in ("cmas_base", "cmas_rl") for run in worlds],
        worlds,
        SYSTEMS,
        FEW,
    )
    alone = [
        analyse([given(s, run, worlds[run]) for s in ("cmas_base", "cmas_rl")], worlds[run],
                SYSTEMS, FEW)
        for run in worlds
    ]  # fmt: skip
    mean = sum(one.system("cmas_rl").strict["avg"].macro.value for one in alone) / 2
    assert found.system("cmas_rl").strict["avg"].macro.value == pytest.approx(mean)
    assert found.system("cmas_rl").num_records == 2 * 7 * 6 * 4
    assert found.system("cmas_rl").run_spread is not None


def test_same_input_same_bytes_in_any_order(single: Results) -> None:
    inputs = []
    for system in reversed(made.SKILLS):
        records = made.records(system, QUESTIONS)
        random.Random(3).shuffle(records)
        inputs.append(RecordsInput(to_table(records), RunProvenance(records=f"digest-{system}-0")))
    again = analyse(
        inputs, QUESTIONS[::-1], SYSTEMS, FEW, scale=tiny(), provenance=single.provenance
    )
    assert again.model_copy(update={"curves": single.curves}).to_json() == single.to_json()


def test_a_system_given_twice_is_refused() -> None:
    with pytest.raises(RecordsError, match="cmas_rl, run 0 are given twice"):
        analyse([given("cmas_rl"), given("cmas_rl")], QUESTIONS, SYSTEMS, FEW)
    with pytest.raises(RecordsError, match="no records"):
        analyse([], QUESTIONS, SYSTEMS, FEW)


def test_records_of_others_are_taken_as_they_are() -> None:
    bare = [
        {"system": "theirs", "question_id": q.id, "attempt": k, "output": "<answer>no</answer>"}
        for q in QUESTIONS
        for k in range(4)
    ]
    from moopd.evaluation.records import _table

    found = analyse([RecordsInput(_table(bare)), given("cmas_rl")], QUESTIONS, SYSTEMS, FEW)
    theirs = found.system("theirs")
    assert theirs.workload == {} and theirs.funnel is None and theirs.budgets == {}
    assert theirs.shares == {"with_answer": 100.0}
    assert found.reference == "cmas_rl"


def test_critic_row_is_labelled(single: Results) -> None:
    (note,) = single.system("prompted_critic").notes
    assert "judged by" in note
    assert all(not s.notes for s in single.systems if s.name != "prompted_critic")


def test_deviations_and_open_choices_are_listed(single: Results) -> None:
    lines = {choice.item: choice for choice in single.deviations}
    rate = lines["learning rate (training.lr)"]
    assert (rate.used, rate.paper) == ("0.0003", "1e-06")
    assert "passages per query (retrieval.top_k)" not in lines  # 3, as the paper's
    assert any("KL" in choice.item for choice in single.open_choices)
    assert single.limits[0].startswith("Intervals resample questions for fixed policies")


def test_metrics_for_a_tracker(single: Results) -> None:
    flat = single.metrics("cmas_rl")
    assert flat["avg_at_4/macro"] == single.system("cmas_rl").strict["avg"].macro.value
    assert "workload/searches" in flat and "share/no_search" in flat
    assert all(re.fullmatch(r"[A-Za-z0-9_/]+", name) for name in flat)


# ---------------------------------------------------------------- report


class Page(HTMLParser):
    """Collects what a browser would fetch and where links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.num_scripts = 0
        self.data: dict[str, str] = {}
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        got = {name: value or "" for name, value in attrs}
        self.num_scripts += tag == "script"
        self._in = got.get("id", "") if tag == "script" else ""
        if "id" in got:
            self.ids.append(got["id"])
        if tag == "a":
            self.links.append(got["href"])
        for name in ("src", "srcset", "data", "poster"):
            if name in got:
                self.fetched.append(got[name])
        if tag == "link":
            self.fetched.append(got.get("href", ""))
        assert not any(name.startswith("on") for name in got), got

    def handle_data(self, data: str) -> None:
        if self._in:
            self.data[self._in] = self.data.get(self._in, "") + data


@pytest.fixture(scope="module")
def report(several: Results, tmp_path_factory: pytest.TempPathFactory) -> ReportPaths:
    return write_report(several, tmp_path_factory.mktemp("report"))


def test_report_is_one_file_without_network(several: Results, report: ReportPaths) -> None:
    paths = report
    text = paths.html.read_text()
    page = Page()
    page.feed(text)
    assert page.fetched == []
    assert not re.findall(r"@import|url\((?!#)", text)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert "default-src 'none'" in text
    assert read_results(paths.json) == several
    assert len(paths.figures) == 12
    for path in paths.figures:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def test_report_names_what_a_reader_must_know(report: ReportPaths) -> None:
    for text in (report.html.read_text(), report.markdown.read_text()):
        flat = " ".join(text.split())
        assert "These intervals resample questions for fixed policies" in flat
        assert "paper 38.68" in flat.replace('<small class="paper">', "paper ")
        assert "digest-cmas_rl-2" in flat and "c" * 64 in flat
        assert "vLLM, float16" in flat
        assert "runs and questions" in flat
    assert "](figures/forest.png)" in report.markdown.read_text()


def test_markdown_tables_are_well_formed(report: ReportPaths) -> None:
    lines = report.markdown.read_text().splitlines()
    for above, line in pairwise(lines):
        if above.startswith("| ") and line.startswith("|"):
            assert above.count("|") - above.count("\\|") == line.count("|") - line.count("\\|")


def test_report_has_the_same_bytes_twice(
    several: Results, report: ReportPaths, tmp_path: Path
) -> None:
    first, second = report, write_report(several, tmp_path)
    for one, other in zip((*first[:3], *first[3]), (*second[:3], *second[3]), strict=True):
        assert one.read_bytes() == other.read_bytes(), one


# ---------------------------------------------------------------- from the shell


def write_inputs(
    folder: Path, records: list[EvalRecord], asked: list[Question] = QUESTIONS
) -> tuple[Path, Path]:
    write_records(folder / "records.parquet", records)
    write_questions(asked, folder / "questions.jsonl")
    return folder / "records.parquet", folder / "questions.jsonl"


def test_score_prints_table_and_differences(tmp_path: Path) -> None:
    records = [*made.records("cmas_rl", QUESTIONS), *made.records("multiagent_opd", QUESTIONS)]
    path, questions = write_inputs(tmp_path, records)
    console = Console(record=True, width=120)
    found = score_files([path], questions, statistics=FEW, console=console)
    shown = console.export_text()
    assert "MultiAgent-OPD" in shown and "paper 38.68" in shown and "paper 2.61" in shown
    value = found.system("multiagent_opd").strict["avg"].macro.value
    assert f"{value:.1f}" in shown
    assert "resample questions for fixed policies" in " ".join(shown.split())


def test_records_cannot_act_as_html_or_as_markup(tmp_path: Path) -> None:
    asked = [replace(question, text=question.text + NASTY) for question in QUESTIONS]
    output = f"<answer>{NASTY}</answer>"
    records = [
        replace(record, system=system, output=output)
        for system in ("cmas_base", f"[red]{NASTY}")
        for record in made.records("cmas_base", asked)
    ]
    path, questions = write_inputs(tmp_path, records, asked)
    console = Console(record=True, width=300)
    score_files([path], questions, statistics=FEW, console=console, report_folder=tmp_path / "r")
    assert "[red]" in console.export_text()
    page = Page()
    page.feed((tmp_path / "r" / "report.html").read_text())
    assert page.num_scripts == 4  # three blocks of data and the viewer
    assert NASTY in json.loads(page.data["case-data"])["cases"][0]["question"]


def test_score_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path, questions = write_inputs(tmp_path, made.records("cmas_rl", QUESTIONS)[:-1])
    with pytest.raises(RecordsError, match="missing attempts") as error:
        score_files([path], questions)
    assert error.value.ids == (f"{QUESTIONS[-1].id} attempt 3",)
    with pytest.raises(RecordsError, match="no record files"):
        score_files([], questions)


def test_questions_in_a_foreign_layout(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"id": "nq-1", "dataset": "nq", "question": "who?", "answers": ["yes"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (question,) = load_questions(path)
    assert (question.id, question.answers, question.answer_type) == ("nq-1", ("yes",), "yes_no")
    path.write_text('{"id": "nq-1", "dataset": "nq", "answers": ["x"]}\n')
    with pytest.raises(RecordsError, match="first line 1"):
        load_questions(path)


def test_statistics_need_no_torch() -> None:
    code = (
        "import sys, moopd.evaluation.score, moopd.evaluation.report\n"
        "assert not {'torch', 'transformers', 'mlflow', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
