"""Rules (protocol, environment step): a pass is Leader, Searchers, Answerer, then one retrieval."""

from __future__ import annotations

from moopd.config import WorkflowConfig
from moopd.roles.prompts import Prompts
from moopd.types import FormatError, FormatErrorKind, Passage, Role, StopReason
from moopd.workflows.base import Reply, RetrievalOutcome, Workflow
from moopd.workflows.cascade import Cascade
from moopd.workflows.hierarchy import Hierarchy
from tests.support import QUESTION, REPORT, SEARCH, answer


def drive(machine: Workflow, *turns: tuple[str, ...]) -> list[tuple[Role, ...]]:
    """Feed one tuple of replies per exchange; returns the roles asked in each exchange."""
    asked = []
    for texts in turns:
        asks = machine.pending()
        asked.append(tuple(ask.role for ask in asks))
        delivery = machine.deliver(
            [[Reply(text)] * ask.num_candidates for ask, text in zip(asks, texts, strict=True)]
        )
        if delivery.queries:
            machine.deliver_passages([RetrievalOutcome() for _ in delivery.queries])
    return asked


def hierarchy(**limits: int) -> Hierarchy:
    return Hierarchy(QUESTION, WorkflowConfig(**limits), Prompts("compact"))


def test_cascade_report_and_answer_share_a_step() -> None:
    machine = Cascade(QUESTION, WorkflowConfig(), Prompts("compact"))
    asked = drive(machine, (SEARCH,), (SEARCH,), (REPORT,), (answer(),))
    assert asked == [(Role.SEARCHER,)] * 3 + [(Role.ANSWERER,)]
    # Pass 1: search; pass 2: search; pass 3: report and answer.
    assert (machine.step, machine.num_tool_steps, machine.stop) == (3, 2, StopReason.ANSWERED)


def test_cascade_stops_after_five_steps_without_a_forced_answer() -> None:
    machine = Cascade(QUESTION, WorkflowConfig(), Prompts("compact"))
    drive(machine, *[(SEARCH,)] * 5)
    assert (machine.step, machine.stop, machine.pending()) == (5, StopReason.STEP_BUDGET, ())


def test_cascade_malformed_turn_spends_its_step_and_is_told() -> None:
    machine = Cascade(QUESTION, WorkflowConfig(), Prompts("compact"))
    drive(machine, ("nonsense",))
    (ask,) = machine.pending()
    assert (ask.step, ask.messages[0].content) == (2, "malformed")


def test_a_report_without_any_search_is_legal() -> None:
    machine = Cascade(QUESTION, WorkflowConfig(), Prompts("compact"))
    drive(machine, (REPORT,), (answer(),))
    assert (machine.step, machine.num_tool_steps, machine.stop) == (1, 0, StopReason.ANSWERED)


def test_five_rounds_of_one_search_and_the_answer_take_eleven_steps() -> None:
    # 2 x 5 + 1 (protocol, environment step): dispatch + search, report; ...; selection + answer.
    machine = hierarchy()
    round_ = [("<task> a </task>",), (SEARCH,), (REPORT,)]
    drive(machine, *round_ * 5, ("<select> 1 </select>",), (answer(),))
    assert (machine.step, machine.num_rounds, machine.num_tool_steps) == (11, 5, 5)
    assert machine.stop is StopReason.ANSWERED


def test_parallel_searches_count_one_tool_step_and_two_search_actions() -> None:
    machine = hierarchy()
    asked = drive(machine, ("<task>a</task><task>b</task>",), (SEARCH, SEARCH), (REPORT, SEARCH))
    assert asked == [(Role.LEADER,), (Role.SEARCHER,) * 2, (Role.SEARCHER,) * 2]
    # Pass 1: two parallel searches; pass 2: one report, one search.
    assert machine.num_tool_steps == 2
    assert len(machine.retrievals) == 3
    assert [ask.conversation for ask in machine.pending()] == [machine.searchers[1].conversation]


def test_malformed_queries_do_not_count_as_tool_steps() -> None:
    machine = hierarchy()
    drive(machine, ("<task>a</task>",), ("<search> </search>",))
    assert (machine.num_tool_steps, machine.step) == (0, 2)


def test_sixth_dispatch_goes_to_the_answerer_with_all_reports() -> None:
    machine = hierarchy()
    drive(machine, *[("<task> a </task>",), (REPORT,)] * 5)
    (delivery,) = [machine.deliver([[Reply("<task> a </task>")]]) for _ in machine.pending()]
    assert delivery.actions == ((FormatError(FormatErrorKind.ROUND_LIMIT),),)
    (ask,) = machine.pending()
    assert (ask.role, machine.selected, machine.num_rounds) == (Role.ANSWERER, (1, 2, 3, 4, 5), 5)


def test_malformed_leader_turn_goes_to_the_answerer() -> None:
    machine = hierarchy()
    drive(machine, ("hm",), (answer(),))
    assert (machine.stop, machine.selected, machine.step) == (StopReason.ANSWERED, (), 1)


def test_unknown_report_ids_are_dropped_and_counted() -> None:
    machine = hierarchy()
    drive(machine, ("<task>a</task>",), (REPORT,), ("<select> 1 7 0 </select>",))
    assert (machine.selected, machine.num_unknown_report_ids) == ((1,), 2)


def test_step_budget_leaves_no_report_of_unfinished_searchers() -> None:
    machine = hierarchy(hierarchy_steps=2)
    drive(machine, ("<task>a</task>",), (SEARCH,), (SEARCH,))
    assert (machine.stop, machine.reports) == (StopReason.STEP_BUDGET, [])


def test_the_answerer_sees_the_selected_reports_alone_in_the_leaders_order() -> None:
    machine = hierarchy()
    tasks = ("<task>a</task><task>b</task><task>c</task>",)
    drive(machine, tasks, tuple(f"<report> {word} </report>" for word in ("x", "y", "z")))
    drive(machine, ("<select> 3 1 </select>",))
    (ask,) = machine.pending()
    assert machine.selected == (3, 1)
    assert ask.messages[-1].content == "answerer question who a report 3 z report 1 x"


def test_the_leader_sees_the_reports_of_the_last_round_alone() -> None:
    machine = hierarchy()
    drive(machine, *[("<task>a</task>",), (REPORT,)] * 2)
    (ask,) = machine.pending()
    assert ask.messages[0].content == "report 2 x"


def test_of_one_dispatch_only_so_many_subtasks_are_taken() -> None:
    machine = hierarchy(max_subtasks_per_round=2)
    drive(machine, ("<task>a</task><task>b</task><task>c</task>",))
    assert [subtask.text for subtask in machine.subtasks] == ["a", "b"]
    assert len(machine.pending()) == 2


def test_candidates_are_asked_of_the_answerer_alone() -> None:
    machine = Hierarchy(QUESTION, WorkflowConfig(), Prompts("compact"), num_candidates=5)
    asked = []
    for text in ("<task>a</task>", SEARCH, REPORT, "<select> 1 </select>", answer()):
        (ask,) = machine.pending()
        asked.append((ask.role, ask.num_candidates))
        drive(machine, (text,))
    assert asked == [
        (Role.LEADER, 1), (Role.SEARCHER, 1), (Role.SEARCHER, 1), (Role.LEADER, 1),
        (Role.ANSWERER, 5),
    ]  # fmt: skip


def test_the_record_counts_steps_as_the_machine_did_and_sums_cut_passages() -> None:
    machine = Cascade(QUESTION, WorkflowConfig(), Prompts("compact", max_passage_words=1))
    cut = RetrievalOutcome((Passage("p", "t", "red harbor"), Passage("q", "t", "red")))
    for _ in range(2):
        machine.pending()
        machine.deliver([[Reply(SEARCH)]])
        machine.deliver_passages([cut])
    drive(machine, (REPORT,), (answer(),))
    record = machine.trajectory(3, [])
    # Searches in passes 1 and 2, one of two passages cut each time; report and answer in pass 3.
    assert (record.group_index, record.num_steps, record.num_tool_steps) == (3, 3, 2)
    assert record.num_cut_passages == 2


def test_leader_sees_reports_and_what_is_missing() -> None:
    machine = hierarchy(leader_rounds=1)
    drive(machine, ("<task>a</task><task>b</task>",), (REPORT, REPORT))
    (ask,) = machine.pending()
    assert ask.messages[0].content == "report 1 x report 2 x last round"


def test_a_failed_retrieval_is_not_shown_as_an_empty_one() -> None:
    machine = hierarchy()
    machine.pending()
    machine.deliver([[Reply("<task>a</task>")]])
    machine.pending()
    machine.deliver([[Reply(SEARCH)]])
    machine.deliver_passages([RetrievalOutcome(error="server down")])
    assert machine.retrievals[0].error == "server down"
    assert machine.pending()[0].messages[0].content == "search failed"
