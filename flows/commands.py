"""The commands behind `moopd`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from moopd.config import ConfigError
from tasks.home import Home, open_home


def use_home(home: Home) -> None:
    """Point Prefect at the home before it is imported; quiet, offline, patient."""
    os.environ.setdefault("PREFECT_HOME", str(home.prefect))
    os.environ.setdefault("PREFECT_LOCAL_STORAGE_PATH", str(home.prefect / "results"))
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("PREFECT_CLI_PROMPT", "false")


def run(options: argparse.Namespace) -> int:
    """`moopd run`: the pipeline, then the results table and where everything is."""
    if options.dry_run:
        return plan(options)
    home = open_home()
    use_home(home)
    from flows.reproduce import raise_on_sigterm, reproduce
    from tasks.execute import MissingInput

    raise_on_sigterm()
    try:
        paths = reproduce(
            scale=options.scale,
            systems=options.system or None,
            overrides=options.set,
            seeds=options.seeds,
            only=options.only or None,
            start=options.start,
            force=options.force or None,
            home=str(home.root),
        )
    except MissingInput as error:
        print(f"moopd: {error}; run these stages first, or leave out --only", file=sys.stderr)
        return 3
    except (ConfigError, ValueError):
        raise
    except Exception as error:
        print(f"moopd: {error}", file=sys.stderr)
        return 1
    _show_results(paths, home)
    return 0


def plan(options: argparse.Namespace) -> int:
    """`moopd plan`: cached, stale (which facet changed), missing, and what the run would cost."""
    from flows.planning import print_plan

    print_plan(options.scale, options.set, options.system, options.seeds, open_home())
    return 0


def status(options: argparse.Namespace) -> int:
    from flows.planning import print_status

    print_status(open_home())
    return 0


def score(options: argparse.Namespace) -> int:
    from moopd.evaluation.score import score_files

    report = Path(options.report) if options.report else None
    score_files([Path(p) for p in options.records], Path(options.questions), report_folder=report)
    return 0


def ask(options: argparse.Namespace) -> int:
    from flows.ask import answer_question

    if len(options.system) != 1:
        raise ConfigError("moopd ask needs one --system NAME, for example multiagent_opd")
    answer_question(options.question, options.scale, options.set, options.system[0], open_home())
    return 0


def _show_results(paths: dict[str, str], home: Home) -> None:
    if "statistics" not in paths or "report" not in paths:
        return
    from rich.console import Console

    from moopd.evaluation.results import read_results
    from moopd.evaluation.score import print_results

    print_results(read_results(Path(paths["statistics"]) / "results.json"), Console())
    print(f"\nReport:  {paths['report']}/report.html")
    print("Pages:   `moopd up`, then Prefect at http://127.0.0.1:4200, MLflow at :5000")
