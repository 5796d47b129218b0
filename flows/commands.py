"""The commands behind `moopd`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from flows import servers
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
    address = servers.running(home).get("prefect")
    if address:
        os.environ.setdefault("PREFECT_API_URL", f"{address}/api")


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
        mirror(home)
        return 1
    _show_results(paths, home)
    return 0


def mirror(home: Home) -> str:
    """Bring MLflow up to the journal; the comparison page's path, empty when MLflow is away.

    Tracking never fails a run: what could not be mirrored is replayed by the next sync.
    """
    try:
        from moopd.tracking.mlflow_mirror import Mirror

        store = Mirror(home.mlflow)
        store.sync(home.journal)
        return store.comparison_path()
    except Exception as error:
        print(f"moopd: MLflow is behind ({error}); `moopd track sync` catches up", file=sys.stderr)
        return ""


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
    comparison = mirror(home)
    if "statistics" not in paths or "report" not in paths:
        return
    from rich.console import Console

    from moopd.evaluation.results import read_results
    from moopd.evaluation.score import print_results

    print_results(read_results(Path(paths["statistics"]) / "results.json"), Console())
    print(f"\nReport:  {paths['report']}/report.html")
    addresses = servers.running(home) or servers.DEFAULTS
    print(f"Prefect: {addresses['prefect']}")
    print(f"MLflow:  {addresses['mlflow']}{comparison}")
    if not servers.running(home):
        print("         (open both pages with `moopd up`)")


def up(_options: argparse.Namespace) -> int:
    home = open_home()
    use_home(home)
    os.environ.pop("PREFECT_API_URL", None)
    return servers.serve(home)


def deploy(_options: argparse.Namespace) -> int:
    """Work pool and all deployments of prefect.yaml, on the server that `moopd up` runs."""
    use_home(open_home())
    create = ["work-pool", "create", servers.POOL, "--type", "process", "--overwrite"]
    return servers.prefect(open_home(), create) or servers.prefect(
        open_home(), ["--no-prompt", "deploy", "--all"]
    )


def worker(_options: argparse.Namespace) -> int:
    use_home(open_home())
    return servers.prefect(open_home(), ["worker", "start", "--pool", servers.POOL])


def track(_options: argparse.Namespace) -> int:
    from moopd.tracking.mlflow_mirror import Mirror

    home = open_home()
    print(f"{Mirror(home.mlflow).sync(home.journal)} events taken over into {home.mlflow}")
    return 0


def compare(_options: argparse.Namespace) -> int:
    home = open_home()
    addresses = servers.running(home) or servers.DEFAULTS
    print(f"{addresses['mlflow']}{mirror(home)}")
    return 0


def report(_options: argparse.Namespace) -> int:
    from tasks.artifacts import previous

    found = previous(open_home(), "report")
    if found is None:
        print("moopd: no report yet; expected one after `moopd run`", file=sys.stderr)
        return 3
    print(f"{found.ref.path}/report.html")
    return 0


def retrieve(options: argparse.Namespace) -> int:
    """Serve the index of a scale over HTTP (POST /retrieve), on loopback."""
    from flows.ask import pipeline_artifacts
    from moopd.retrieval.build import open_index
    from moopd.retrieval.server import serve
    from tasks.configuration import load_configuration

    settings, rows = load_configuration(options.scale, options.set)
    found = pipeline_artifacts(settings, rows, "index", open_home())
    serve(open_index(settings.retrieval, found["index"] / "index"), port=options.port)
    return 0


def doctor(_options: argparse.Namespace) -> int:
    from flows.doctor import check

    return check(open_home())
