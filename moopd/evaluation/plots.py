"""The figures of the report, each a function of the results and of the room it has."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from math import ceil
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moopd.evaluation.figures import COLORS, Layout, Plot
from moopd.evaluation.funnel import Place
from moopd.evaluation.results import CurvePoint, Difference, Estimate, Results

PLACES: dict[str, tuple[str, str]] = {
    Place.CORRECT: ("correct", "#3fb68e"),
    Place.FORMAT: ("answer malformed or missing", "#a3adba"),
    Place.NOT_ANSWERED: ("in a selected report, not answered", "#e3b23c"),
    Place.NOT_SELECTED: ("in a report, not selected", "#e8954a"),
    Place.NOT_REPORTED: ("in a passage, in no report", "#e07a86"),
    Place.NOT_RETRIEVED: ("in no retrieved passage", "#b490e0"),
    Place.NOT_SEARCHED: ("no search", "#7f9fe0"),
}
"""Place -> (wording, colour), from success back along the chain."""

CURVES: dict[str, str] = {
    "em": "exact match, development set (%)",
    "searches": "searches per workflow",
    "no_search": "workflows without a search (%)",
    "with_subtasks": "workflows with subtasks (%)",
    "with_reports": "workflows with reports (%)",
    "with_answer": "workflows with a final answer (%)",
}
"""Metric -> title; the last four are the collapse panel (section A.5)."""
_PAPER = "#8a94a3"
_INK_ON_BAR = "#0d1014"
_COUNTED = ("searches",)
_SHARES = ("no_search", "with_subtasks", "with_reports", "with_answer")


def plots(results: Results) -> dict[str, tuple[str, Plot]]:
    """Name -> (caption, plot) of every figure that the results can fill."""
    found: dict[str, tuple[str, Plot]] = {
        "sets": ("avg@{n} per set and macro, with intervals", partial(set_bars, results)),
    }
    if len(results.systems) > 1:
        found["forest"] = (
            "Paired differences in macro avg@{n}: on the right of zero the first row is better",
            partial(forest, results),
        )
    if results.curves:
        found["curves"] = (
            "Training: development score, searches and the collapse panel over steps",
            partial(training_curves, results),
        )
    if any(system.workload for system in results.systems):
        found["workload"] = (
            "Macro avg@{n} against what a workflow costs",
            partial(accuracy_workload, results),
        )
    if any(system.funnel for system in results.systems):
        found["funnel"] = (
            "Where workflows end: correct, or the first broken link",
            partial(failure_funnel, results),
        )
    if any(system.budgets for system in results.systems):
        found["budgets"] = (
            "Share of workflows that are correct and finished within a budget",
            partial(budget_curves, results),
        )
    n = str(results.num_attempts)
    return {name: (caption.replace("{n}", n), plot) for name, (caption, plot) in found.items()}


def set_bars(results: Results, layout: Layout) -> Figure:
    """One panel per set and one for the macro average, one bar per row."""
    names = [*results.sets, "macro"] if len(results.sets) > 1 else list(results.sets)
    columns = min(layout.columns, len(names))
    lines = ceil(len(names) / columns)
    height = 0.45 + (0.21 if layout.wide else 0.36) * len(results.systems)
    figure, panels = _grid(layout.width, height * lines, lines, columns)
    labels = [_label(system.title, layout) for system in results.systems]
    for place, axes in enumerate(panels):
        if place >= len(names):
            axes.set_visible(False)
            continue
        for k, system in enumerate(results.systems):
            scores = system.strict["avg"]
            estimate = scores.macro if names[place] == "macro" else scores.sets[names[place]]
            axes.barh(k, estimate.value, color=_color(results, k), height=0.72)
            _whisker(axes, estimate, k)
        axes.set_title(names[place])
        axes.set_yticks(range(len(labels)), labels if place % columns == 0 else [""] * len(labels))
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, None)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(4 if layout.wide else 3, steps=[1, 2, 2.5, 5, 10]))
    return figure


def forest(results: Results, layout: Layout) -> Figure:
    """Reference against every main row, its last step against the ablations; paper as a diamond."""
    groups = [results.differences_of("avg", group) for group in ("main", "ablation")]
    groups = [group for group in groups if group]
    sizes = [len(group) for group in groups]
    figure = Figure(figsize=(layout.width, 0.5 + sum(0.8 + 0.4 * size for size in sizes)))
    panels = figure.subplots(len(groups), 1, squeeze=False, sharex=True, height_ratios=sizes)
    for axes, group in zip(panels.ravel(), groups, strict=True):
        for k, difference in enumerate(group):
            _forest_line(axes, difference, k)
        axes.axvline(0, color=_ink(), linewidth=0.8)
        labels = [_label(results.title(difference.second), layout) for difference in group]
        axes.set_yticks(range(len(group)), labels)
        axes.set_ylim(len(group) - 0.4, -0.6)
        axes.set_title(f"{results.title(group[0].first)} minus")
        axes.grid(axis="y", visible=False)
    panels.ravel()[-1].set_xlabel("percentage points of macro avg@" + str(results.num_attempts))
    diamond = Line2D([], [], marker="D", mfc="none", color=_PAPER, lw=0.9, markersize=5)
    handles = [Line2D([], [], marker="o", color=COLORS[1], lw=3), diamond]
    figure.legend(handles, ["here", "paper"], loc="outside lower center", ncols=2)
    return figure


def training_curves(results: Results, layout: Layout) -> Figure:
    """Means over runs, single runs behind them."""
    metrics = [m for m in CURVES if any(point.metric == m for point in results.curves)]
    columns = min(3 if layout.wide else 1, len(metrics))
    lines = ceil(len(metrics) / columns)
    figure, panels = _grid(layout.width, 2.3 * lines + 0.6, lines, columns)
    for place, axes in enumerate(panels):
        if place >= len(metrics):
            axes.set_visible(False)
            continue
        metric = metrics[place]
        factor = 1.0 if metric in _COUNTED else 100.0
        for k, system in enumerate(results.systems):
            points = [p for p in results.curves if p.system == system.name and p.metric == metric]
            _curve(axes, points, factor, _color(results, k), system.name == results.reference)
        axes.set_title(CURVES[metric], fontsize=8.5)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if metric in _SHARES:
            axes.set_ylim(-4, 104)
    trained = [s.name for s in results.systems if any(p.system == s.name for p in results.curves)]
    _legend(figure, results, layout, trained)
    return figure


def accuracy_workload(results: Results, layout: Layout) -> Figure:
    """Score against searches and input tokens, both with intervals."""
    kinds = {"searches": "searches per workflow", "input_tokens": "input tokens per workflow"}
    shown = [k for k in kinds if any(k in system.workload for system in results.systems)]
    columns = len(shown) if layout.wide else 1
    lines = ceil(len(shown) / columns)
    figure, panels = _grid(layout.width, 3.1 * lines + 0.7, lines, columns)
    for axes, kind in zip(panels, shown, strict=False):
        for k, system in enumerate(results.systems):
            if kind in system.workload:
                _cross(
                    axes,
                    system.workload[kind].macro,
                    system.strict["avg"].macro,
                    _color(results, k),
                    "s" if system.workflow == "cascade" else "o",
                )
        axes.set_xlabel(kinds[kind])
        axes.set_ylabel(f"macro avg@{results.num_attempts} (%)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    _legend(figure, results, layout, [system.name for system in results.systems], marker=True)
    return figure


def failure_funnel(results: Results, layout: Layout) -> Figure:
    """Shares of workflows by place; yes/no questions in a panel of their own."""
    systems = [system for system in results.systems if system.funnel]
    kinds = {"span": "name, date or phrase questions", "yes_no": "yes/no questions"}
    counts = {
        kind: [getattr(system.funnel, kind) for system in systems]
        for kind in kinds
        if any(sum(getattr(system.funnel, kind).values()) for system in systems)
    }
    row = 0.3 if layout.wide else 0.36
    height = len(counts) * (0.55 + row * len(systems)) + (0.7 if layout.wide else 1.6)
    figure, panels = _grid(layout.width, height, len(counts), 1)
    for axes, (kind, of_systems) in zip(panels, counts.items(), strict=True):
        for k, places in enumerate(of_systems):
            total, left = sum(places.values()), 0.0
            for place, (_, color) in PLACES.items():
                share = 100 * places[place] / total
                axes.barh(k, share, left=left, color=color, height=0.74)
                if share >= (3.5 if layout.wide else 9):
                    middle = left + share / 2
                    axes.text(
                        middle,
                        k,
                        f"{share:.0f}",
                        ha="center",
                        va="center",
                        color=_INK_ON_BAR,
                        fontsize=8,
                    )
                left += share
        axes.set_title(kinds[kind])
        axes.set_yticks(range(len(systems)), [_label(s.title, layout) for s in systems])
        axes.set_ylim(len(systems) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.grid(visible=False)
    panels[-1].set_xlabel("% of workflows")
    handles = [Line2D([], [], marker="s", ls="", color=color) for _, color in PLACES.values()]
    figure.legend(
        handles,
        [wording for wording, _ in PLACES.values()],
        loc="outside lower center",
        ncols=3 if layout.wide else 1,
    )
    return figure


def budget_curves(results: Results, layout: Layout) -> Figure:
    """Curves over budgets of searches and of tokens, with interval bands."""
    kinds = {"searches": "budget: searches", "tokens": "budget: input + output tokens"}
    shown = [k for k in kinds if any(k in system.budgets for system in results.systems)]
    columns = len(shown) if layout.wide else 1
    lines = ceil(len(shown) / columns)
    figure, panels = _grid(layout.width, 3.1 * lines + 0.7, lines, columns)
    for axes, kind in zip(panels, shown, strict=False):
        for k, system in enumerate(results.systems):
            points = system.budgets.get(kind, ())
            budgets = [point.budget for point in points]
            step = "post" if kind == "searches" else "default"
            bold = system.name == results.reference
            axes.plot(
                budgets,
                [point.share.value for point in points],
                color=_color(results, k),
                linewidth=2.4 if bold else 1.4,
                drawstyle=f"steps-{step}" if step == "post" else step,
            )
            axes.fill_between(
                budgets,
                [point.share.low for point in points],
                [point.share.high for point in points],
                color=_color(results, k),
                alpha=0.14,
                linewidth=0,
                step="post" if step == "post" else None,
            )
        axes.set_xlabel(kinds[kind])
        axes.set_ylabel("correct within budget (%)")
        axes.set_ylim(0, None)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _legend(figure, results, layout, [system.name for system in results.systems])
    return figure


# ---------------------------------------------------------------- parts


def _grid(width: float, height: float, lines: int, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(lines, columns, squeeze=False)
    return figure, list(panels.ravel())


def _color(results: Results, place: int) -> str:
    return COLORS[place % len(COLORS)]


def _ink() -> str:
    return str(matplotlib.rcParams["text.color"])


def _label(title: str, layout: Layout, factor: float = 1.0) -> str:
    return "\n".join(textwrap.wrap(title, int(layout.label_letters * factor)))


def _whisker(axes: Axes, estimate: Estimate, place: float) -> None:
    axes.plot([estimate.low, estimate.high], [place, place], color=_ink(), linewidth=1)


def _forest_line(axes: Axes, difference: Difference, place: int) -> None:
    macro = difference.macro
    color = COLORS[1] if macro.excludes_zero else COLORS[0]
    if difference.over_runs is not None:
        wide = difference.over_runs
        axes.plot([wide.low, wide.high], [place, place], color=color, linewidth=0.9)
        axes.plot([wide.low] * 2, [place - 0.12, place + 0.12], color=color, linewidth=0.9)
        axes.plot([wide.high] * 2, [place - 0.12, place + 0.12], color=color, linewidth=0.9)
    axes.plot([macro.low, macro.high], [place, place], color=color, linewidth=3)
    axes.plot(macro.value, place, marker="o", color=color, markersize=6)
    if difference.reported is not None:
        paper, below = difference.reported, place + 0.27
        axes.plot([paper.low, paper.high], [below, below], color=_PAPER, linewidth=0.9)
        axes.plot(paper.value, below, marker="D", mfc="none", color=_PAPER, markersize=4)


def _curve(axes: Axes, points: Sequence[CurvePoint], factor: float, color: str, bold: bool) -> None:
    runs = sorted({point.run for point in points})
    steps = sorted({point.step for point in points})
    if len(runs) > 1:
        for run in runs:
            of_run = sorted((p.step, factor * p.value) for p in points if p.run == run)
            axes.plot(*zip(*of_run, strict=True), color=color, linewidth=0.7, alpha=0.35)
    if steps:
        means = [factor * fmean(p.value for p in points if p.step == step) for step in steps]
        axes.plot(steps, means, color=color, linewidth=2.4 if bold else 1.4, marker=".")


def _cross(axes: Axes, x: Estimate, y: Estimate, color: str, marker: str) -> None:
    axes.plot([x.low, x.high], [y.value, y.value], color=color, linewidth=1.1)
    axes.plot([x.value, x.value], [y.low, y.high], color=color, linewidth=1.1)
    axes.plot(x.value, y.value, marker=marker, color=color, markersize=7, ls="")


def _legend(
    figure: Figure, results: Results, layout: Layout, names: Sequence[str], marker: bool = False
) -> None:
    handles, labels = [], []
    for k, system in enumerate(results.systems):
        if system.name in names:
            shape = "s" if system.workflow == "cascade" else "o"
            handles.append(
                Line2D(
                    [],
                    [],
                    color=_color(results, k),
                    marker=shape if marker else "",
                    ls="" if marker else "-",
                    linewidth=2.4 if system.name == results.reference else 1.6,
                )
            )
            labels.append(system.title)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4 if layout.wide else 2,
        columnspacing=1.2,
        handlelength=1.4,
    )
