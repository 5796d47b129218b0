"""The commands behind `moopd`."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
from pathlib import Path

from flows import servers
from flows.selection import Selection
from moopd.config import ConfigError
from moopd.tracking import journal
from tasks import artifacts
from tasks.configuration import load_configuration, wanted_systems
from tasks.home import Home, open_home
from tasks.keys import input_files
from tasks.mirroring import comparison_path
from tasks.stages import MissingInput, pipeline


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
    # A failed stage is said once, by us; its traceback is in the log of its worker.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    use_home(home)
    check_names(options)
    raise_on_sigterm()
    with servers.api(home) as own_server:
        return _run_flow(options, home, own_server)


def check_names(options: argparse.Namespace) -> None:
    """Configuration errors are said before anything starts."""
    settings, rows = load_configuration(options.scale, options.set)
    stages = pipeline(settings, rows, wanted_systems(settings, rows, options.system), options.seeds)
    Selection(tuple(options.only), options.start, tuple(options.force)).wanted(stages)
    for stage in stages:
        input_files(stage)


def _run_flow(options: argparse.Namespace, home: Home, own_server: bool) -> int:
    from flows import prefect_state
    from flows.reproduce import reproduce
    from tasks.execute import finished_run

    run_id = journal.new_run_id()
    try:
        paths = reproduce.with_options(flow_run_name=run_id)(
            scale=options.scale,
            systems=options.system or None,
            overrides=options.set,
            seeds=options.seeds,
            only=options.only or None,
            start=options.start,
            force=options.force or None,
            verify=options.verify,
            home=str(home.root),
            run_id=run_id,
        )
    except (MissingInput, ConfigError, ValueError):
        raise
    except Exception as error:
        print(f"moopd: {explain(error, home)}", file=sys.stderr)
        return 1
    finally:
        if own_server:
            prefect_state.wait_for_rows(*finished_run(run_id))
    _show_results(paths, home)
    return 0


def explain(error: Exception, home: Home) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {home.root}: free some; the same command goes on from there"
    return str(error)


def raise_on_sigterm() -> None:
    """SIGTERM ends a command like Ctrl-C, so that children end and the journal is closed."""

    def handler(_number: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, handler)


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
    """The table of the paper, then the report and both pages."""
    if "statistics" in paths and "report" in paths:
        from rich.console import Console

        from moopd.evaluation.results import read_results
        from moopd.evaluation.score import print_results

        print_results(read_results(Path(paths["statistics"]) / "results.json"), Console())
        print(f"\nReport:  {paths['report']}/report.html")
    print_addresses(home)


def print_addresses(home: Home) -> None:
    there = servers.running(home)
    addresses = {**servers.DEFAULTS, **there}
    print(f"Prefect: {addresses['prefect']}")
    print(f"MLflow:  {addresses['mlflow']}{comparison_path(home)}")
    if len(there) < len(addresses):
        print("         (open both pages with `moopd up`)")


def up(_options: argparse.Namespace) -> int:
    home = open_home()
    use_home(home)
    os.environ.pop("PREFECT_API_URL", None)
    raise_on_sigterm()
    return servers.serve(home)


def ui(options: argparse.Namespace) -> int:
    """Where the pages are; starts them when they are not there."""
    home = open_home()
    if len(servers.running(home)) < len(servers.DEFAULTS):
        return up(options)
    print_addresses(home)
    return 0


def deploy(_options: argparse.Namespace) -> int:
    """Work pool and all deployments of prefect.yaml, on the server that `moopd up` runs."""
    use_home(open_home())
    create = ["work-pool", "create", servers.POOL, "--type", "process", "--overwrite"]
    return servers.prefect(open_home(), create) or servers.prefect(
        open_home(), ["--no-prompt", "deploy", "--all"]
    )


def worker(_options: argparse.Namespace) -> int:
    use_home(open_home())
    # Prefect's worker turns SIGTERM into SIGINT, which the background jobs of a shell are born
    # ignoring: nothing but kill -9 would end it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return servers.prefect(open_home(), ["worker", "start", "--pool", servers.POOL])


def track(_options: argparse.Namespace) -> int:
    """Mark what was lost, then bring MLflow up to the journal."""
    home = open_home()
    journal.reap(home.journal)
    with servers.mlflow_store(home) as mirror:
        print(f"{mirror.sync(home.journal)} events taken over into {home.mlflow}")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Rows side by side with their paired differences, and the page that draws them."""
    from flows.comparing import print_comparison

    home = open_home()
    found = _newest(home, "statistics")
    print_comparison(Path(found.ref.path) / "results.json", options.rows, options.metric)
    print_addresses(home)
    return 0


def report(options: argparse.Namespace) -> int:
    """Where the newest report is; --render writes it anew from its results."""
    home = open_home()
    if options.render:
        results = _newest(home, "statistics")
        from moopd.evaluation.report import write_report
        from moopd.evaluation.results import read_results

        folder = Path(options.render)
        folder.mkdir(parents=True, exist_ok=True)
        write_report(read_results(Path(results.ref.path) / "results.json"), folder)
        print(f"{folder / 'report.html'}")
        return 0
    print(f"{_newest(home, 'report').ref.path}/report.html")
    return 0


def _newest(home: Home, stage: str) -> artifacts.Artifact:
    """The newest whole artifact of a stage. Raises MissingInput where there is none."""
    found = artifacts.previous(home, stage, whole=True)
    if found is None:
        raise MissingInput([stage])
    return found


def retrieve(options: argparse.Namespace) -> int:
    """Serve the index of a scale over HTTP (POST /retrieve), on loopback."""
    from flows.ask import pipeline_artifacts
    from moopd.retrieval.build import open_index
    from moopd.retrieval.server import serve

    check_port(options.port)
    settings, rows = load_configuration(options.scale, options.set)
    found = pipeline_artifacts(settings, rows, "index", open_home())
    serve(open_index(settings.retrieval, found["index"] / "index"), port=options.port)
    return 0


def check_port(port: int) -> None:
    with socket.socket() as probe:
        # As the server binds: a port that its last user has just left is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((servers.HOST, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} cannot be used ({error}); expected a free one: --port NUMBER"
            ) from None


def doctor(options: argparse.Namespace) -> int:
    from flows.doctor import check

    return check(open_home(), options.scale, options.set)
