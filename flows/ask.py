"""`moopd ask`: a trained team answers one question, and its work is shown in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from moopd.config import ConfigError, Scale
from moopd.printable import printable
from moopd.systems import System
from moopd.types import ArtifactRef, CheckpointRef, Question, Retrieval, Subtask, Trajectory
from tasks import artifacts
from tasks.bodies import read_ref
from tasks.configuration import load_configuration
from tasks.home import Home
from tasks.stages import MissingInput, below, pipeline


def answer_question(
    text: str, scale: str, overrides: Sequence[str], system: str, home: Home
) -> None:
    """Answer with the best checkpoint of `system`. Raises MissingInput when it is not trained."""
    _check_question(text)
    settings, rows = load_configuration(scale, overrides)
    if system not in rows:
        raise ValueError(f"unknown system {system!r}; known: {', '.join(rows)}")
    row = rows[system]
    policy_stage = f"freeze/{system}" if row.train else "base"
    found = pipeline_artifacts(settings, rows, policy_stage, home)
    policy = found[policy_stage]
    trajectory = _roll_out(settings, row, text, read_ref(policy), found["index"])
    show(trajectory, row.title, Console())


def _check_question(text: str) -> None:
    if not text.strip():
        raise ConfigError(
            'got an empty question, expected text: moopd ask "who ...?" --system NAME'
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"got the question {text[:80]!r}, which is no UTF-8; expected text: check the "
            "terminal's encoding"
        ) from None


def pipeline_artifacts(
    scale: Scale, rows: dict[str, System], wanted: str, home: Home
) -> dict[str, Path]:
    """The artifacts of all stages up to `wanted`. Raises MissingInput naming those that are not."""
    refs: dict[str, ArtifactRef] = {}
    needed = below(pipeline(scale, rows, tuple(rows)), wanted)
    for stage in needed:
        found = artifacts.existing(home, stage, refs)
        if found is not None:
            refs[stage.name] = found.ref
    missing = [stage.name for stage in needed if stage.name not in refs]
    if missing:
        raise MissingInput(missing)
    return {name: Path(ref.path) for name, ref in refs.items()}


def _roll_out(
    scale: Scale, system: System, text: str, checkpoint: CheckpointRef, index: Path
) -> Trajectory:
    from moopd.engines.local import LocalEngine
    from moopd.retrieval.build import open_retriever
    from moopd.roles.render import Renderer
    from moopd.trainers.assemble import open_policy, prompts_of
    from moopd.workflows.rollout import Job, Team, run_workflows

    policy = open_policy(scale, checkpoint)
    team = Team(
        system.workflow,
        scale.workflow,
        prompts_of(scale),
        Renderer(policy.tokenizer),
        scale.evaluation.sampling,
        1,
        scale.retrieval.top_k,
    )
    question = Question("asked", "asked", text, ("unknown",))
    engine = LocalEngine(policy.model, policy.tokenizer)
    retriever = open_retriever(scale.retrieval, index / "index")
    (trajectory,) = run_workflows([Job(question, 0, 0)], team, engine, retriever)
    return trajectory


def show(trajectory: Trajectory, title: str, console: Console) -> None:
    """Rounds, subtasks, searches, passages, reports, answer. Text from outside is never markup."""
    console.rule(Text(printable(f"{title}: {trajectory.question.text}")))
    for subtask in trajectory.subtasks:
        console.print(_subtask(trajectory, subtask))
    chosen = ", ".join(map(str, trajectory.selected)) or "none"
    console.print(Text(f"Reports passed to the Answerer: {chosen}", style="dim"))
    answer = trajectory.answers[0] if trajectory.answers else None
    said = answer if answer is not None else f"no answer ({trajectory.stop.value})"
    console.print(Panel(Text(printable(said), style="bold"), title="Answer", border_style="green"))
    console.print(
        Text(
            f"{trajectory.num_searches} searches, {trajectory.num_rounds} rounds, "
            f"{trajectory.num_steps} environment steps, stop: {trajectory.stop.value}",
            style="dim",
        )
    )


def _subtask(trajectory: Trajectory, subtask: Subtask) -> Panel:
    lines = Text()
    for retrieval in trajectory.retrievals:
        if retrieval.subtask == subtask.id:
            lines.append_text(_retrieval(retrieval))
    for report in trajectory.reports:
        if report.subtask == subtask.id:
            lines.append(printable(f"report {report.id}: {report.text}\n"), style="yellow")
    if not lines:
        lines.append("no search, no report\n", style="dim")
    head = f"Round {subtask.round}, subtask {subtask.id + 1}: "
    return Panel(lines, title=Text(printable(head + subtask.text)), title_align="left")


def _retrieval(retrieval: Retrieval) -> Text:
    lines = Text(printable(f"search: {retrieval.query}\n"), style="cyan")
    if retrieval.error is not None:
        lines.append(printable(f"  retrieval failed: {retrieval.error}\n"), style="red")
    for passage in retrieval.passages:
        text = passage.text if len(passage.text) <= 160 else passage.text[:157] + "..."
        lines.append(printable(f"  {passage.title}: {text}\n"), style="dim")
    return lines
