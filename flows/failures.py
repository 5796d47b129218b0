"""What a failed run leaves behind: one page with each failed stage, its reason and its log."""

from __future__ import annotations

from pathlib import Path

from moopd.tracking import journal
from tasks.home import Home

_LOG_LINES = 25


def write_failures(home: Home, run: str) -> Path | None:
    """The page of a run, or None when no stage failed."""
    events = list(journal.read(home.journal / f"{run}.jsonl"))
    done = {e["stage"] for e in events if e["event"] in ("stage_finished", "stage_cached")}
    failed = {
        e["stage"]: e
        for e in events
        if e["event"] == "stage_failed" and e["stage"] not in done and not e.get("cancelled")
    }
    if not failed:
        return None
    lines = [f"# Run {run} failed", "", f"{len(done)} stages are done and are kept."]
    for stage, event in failed.items():
        error, log = event.get("error", ""), str(event.get("log", ""))
        lines += ["", f"## {stage}", "", error, "", f"Log: {log}", ""]
        lines += [f"    {line}" for line in _tail(Path(log))]
    lines += ["", "`moopd run` goes on from the last checkpoint.", ""]
    folder = home.root / "failures"
    folder.mkdir(exist_ok=True)
    path = folder / f"{run}.md"
    path.write_text("\n".join(lines))
    return path


def _tail(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return []
