"""Writes report.html (one file, no network), report.md, report.json and the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moopd.evaluation.figures import draw, inline, write_files
from moopd.evaluation.plots import PLACES, plots
from moopd.evaluation.results import Results
from moopd.evaluation.sections import sections, tiles

_TEMPLATES = Path(__file__).parent / "templates"
INTERVAL_NOTE = (
    "Brackets are {confidence} percentile intervals from {draws:,} draws. These intervals resample "
    "questions for fixed policies; they say nothing about independent training runs."
)


class ReportPaths(NamedTuple):
    html: Path
    markdown: Path
    json: Path
    figures: tuple[Path, ...]


class _Inlined(NamedTuple):
    caption: str
    wide: Markup
    narrow: Markup


def write_report(results: Results, folder: Path) -> ReportPaths:
    """Write the whole report into `folder`; the same results give the same bytes."""
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    inlined = {}
    for name, (caption, plot) in plots(results).items():
        drawn = draw(plot)
        files += write_files(drawn, pictures / name)
        inlined[name] = _Inlined(
            caption,
            Markup(inline(drawn.svg, f"{name}-w")),
            Markup(inline(drawn.narrow_svg, f"{name}-n")),
        )
    paths = ReportPaths(
        folder / "report.html", folder / "report.md", folder / "report.json", tuple(files)
    )
    context = _context(results, inlined)
    paths.html.write_text(_render("report.html.j2", context), encoding="utf-8")
    paths.markdown.write_text(_render("report.md.j2", context), encoding="utf-8")
    paths.json.write_text(results.to_json() + "\n", encoding="utf-8")
    return paths


def _render(name: str, context: dict[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(context)


def _context(results: Results, figures: dict[str, _Inlined]) -> dict[str, Any]:
    cases = results.cases
    named = list(cases.cases[0].attempts) if cases.cases else []
    others = [name for name in named if name != results.reference]
    confidence = f"{100 * results.confidence:g} %"
    return {
        "results": results,
        "reference": results.title(results.reference),
        "figures": figures,
        "sections": sections(results),
        "tiles": tiles(results),
        "labels": list(
            dict.fromkeys(
                f"{system.title}: reports {note}."
                for system in results.systems
                for note in system.notes
            )
        ),
        "interval_note": INTERVAL_NOTE.format(confidence=confidence, draws=results.num_draws),
        "confidence": confidence,
        "num_questions": sum(results.sets.values()),
        "num_runs": max(len(system.runs) for system in results.systems),
        "digests": _digests(results),
        "shared_provenance": list(results.provenance.model_dump(exclude={"runs"}).items()),
        "has_cases": bool(cases.cases),
        "cases": cases.model_dump(mode="json"),
        "case_titles": {name: results.title(name) for name in named},
        "case_places": {str(place): wording for place, (wording, _) in PLACES.items()},
        "case_left": results.reference,
        "case_right": _rival(results, others),
        "css": Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        "js": Markup((_TEMPLATES / "cases.js").read_text(encoding="utf-8")),
    }


def _rival(results: Results, others: list[str]) -> str:
    """The main row that trails the reference least."""
    main = {d.second: d.macro.value for d in results.differences_of("avg", "main")}
    able = [name for name in others if name in main] or others
    return min(able, key=lambda name: main.get(name, 0.0)) if able else results.reference


def _digests(results: Results) -> str:
    shared = results.provenance
    named = (("manifest", shared.manifest), ("config", shared.config))
    parts = [f"{name} {digest[:8]}" for name, digest in named if digest]
    count = len(shared.runs)
    return ", ".join([*parts, f"records of {count} run{'s' if count > 1 else ''}"])
