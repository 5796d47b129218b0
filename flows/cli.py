"""The `moopd` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

DONE, FAILED, CONFIG, MISSING = 0, 1, 2, 3
_MAX_SEEDS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a stage failed, 2 config or environment, 3 missing upstream."""
    options = _parser().parse_args(argv)
    if options.home:
        os.environ["MOOPD_HOME"] = options.home
    from tasks.stages import MissingInput

    try:
        code = int(options.command(options) or DONE)
        sys.stdout.flush()
        return code
    except MissingInput as error:
        print(f"moopd: {error}", file=sys.stderr)
        return MISSING
    except BrokenPipeError:
        # Whoever read our output has gone, as in `moopd status | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (ValueError, OSError) as error:
        print(f"moopd: {_said(error)}", file=sys.stderr)
        return CONFIG
    except KeyboardInterrupt:
        return 130


def _said(error: Exception) -> str:
    from moopd.printable import printable

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        home = os.environ.get("MOOPD_HOME", "the home")
        return f"no space left for {error.filename or home}: free some and try again"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.strerror}: {str(error.filename)[:300]}; expected a place that can be used"
    return printable(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moopd", description="Train teams of search agents, reproducibly."
    )
    parser.add_argument("--home", help="where all state lives (default: MOOPD_HOME or data/home)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_pipeline_commands(commands)
    _add_reading_commands(commands)
    return parser


def _add_pipeline_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser("run", help="run the pipeline, or parts of it")
    _pipeline_options(run)
    part = run.add_mutually_exclusive_group()
    part.add_argument("--only", action="append", default=[], metavar="STAGE")
    part.add_argument("--from", dest="start", metavar="STAGE")
    run.add_argument("--force", action="append", default=[], metavar="STAGE")
    run.add_argument("--verify", action="store_true", help="check the bytes of every cache hit")
    run.add_argument("--dry-run", action="store_true", help="the same as plan")
    run.set_defaults(command=_lazy("run"))
    plan = commands.add_parser("plan", help="what would run, and which facet changed")
    _pipeline_options(plan)
    plan.set_defaults(command=_lazy("plan"))


def _pipeline_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", default="tiny", help="configs/scale/NAME.yaml")
    parser.add_argument("--system", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--seeds", type=_count, default=1, help="training seeds of each trained row"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=VALUE")


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= _MAX_SEEDS:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 1 to {_MAX_SEEDS}")
    return number


def _add_reading_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="runs: running, lost, finished, with durations")
    status.set_defaults(command=_lazy("status"))
    ask = commands.add_parser("ask", help="the team answers one question and shows its work")
    ask.add_argument("question")
    _pipeline_options(ask)
    ask.set_defaults(command=_lazy("ask"))
    compare = commands.add_parser("compare", help="rows side by side, and the comparison page")
    compare.add_argument("rows", nargs="*", metavar="ROW")
    compare.add_argument("--metric", default="avg", help="avg, pass, all or maj")
    compare.set_defaults(command=_lazy("compare"))
    report = commands.add_parser("report", help="where the newest report is")
    report.add_argument("--render", metavar="FOLDER", help="write it anew from its results")
    report.set_defaults(command=_lazy("report"))
    for name, text in _PLAIN_COMMANDS.items():
        commands.add_parser(name, help=text).set_defaults(command=_lazy(name))
    doctor = commands.add_parser(
        "doctor", help="what is installed, missing, full or blocked, and what to do"
    )
    doctor.add_argument("--scale", help="also what this scale needs (paper: minutes)")
    doctor.add_argument("--set", action="append", default=[], metavar="a.b=VALUE")
    doctor.set_defaults(command=_lazy("doctor"))
    track = commands.add_parser("track", help="sync: bring MLflow up to the journal")
    track.add_argument("action", choices=["sync"])
    track.set_defaults(command=_lazy("track"))
    retrieve = commands.add_parser("retrieve", help="serve: the retrieval server of a scale")
    retrieve.add_argument("action", choices=["serve"])
    retrieve.add_argument("--port", type=int, default=8765)
    _pipeline_options(retrieve)
    retrieve.set_defaults(command=_lazy("retrieve"))
    score = commands.add_parser("score", help="score record files, without a model")
    score.add_argument("records", nargs="+")
    score.add_argument("--questions", required=True)
    score.add_argument("--report", help="folder for a full report")
    score.set_defaults(command=_lazy("score"))


_PLAIN_COMMANDS = {
    "up": "Prefect server and MLflow page in the foreground, loopback only",
    "deploy": "register the schedules of prefect.yaml with the running server",
    "worker": "run what is scheduled, until a signal",
    "ui": "where both pages are; starts them when they are not there",
}


def _lazy(name: str):  # type: ignore[no-untyped-def]
    """A command from flows.commands, imported when it is called."""

    def call(options: argparse.Namespace) -> int | None:
        from flows import commands

        chosen = getattr(commands, name)
        result: int | None = chosen(options)
        return result

    return call


if __name__ == "__main__":
    sys.exit(main())
