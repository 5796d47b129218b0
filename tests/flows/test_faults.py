"""What goes wrong around a run: kills, signals, two at once, no network, full or foreign homes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.home import ROOT
from tests.flows.shell import Shell, kill_9, servers_up

NANO = (
    "--scale", "smoke", "--system", "cmas_rl",
    *(part for pair in (
        "warm_start.num_traces=24", "warm_start.steps=2", "data.world.num_train=24",
        "data.dev_size=7", "data.world.test_per_dataset=1", "training.questions_per_step=1",
        "training.validation_questions=2",
    ) for part in ("--set", pair)),
)  # fmt: skip
UP_TO_BASE = ("run", *NANO, "--only", "prepare", "--only", "index", "--only", "base")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A home whose servers run, in a path with a space and accents."""
    shell = Shell(tmp_path_factory.mktemp("où ça"))
    with servers_up(shell):
        yield shell


def states(shell: Shell, kind: str) -> list[str]:
    """States of all flow or task runs in the running Prefect server."""
    address = json.loads((shell.home / "server.json").read_text())["prefect"]
    request = urllib.request.Request(
        f"{address}/api/{kind}/filter", data=b"{}", headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return [row["state_type"] for row in json.load(response)]


def mlflow_states(shell: Shell) -> set[str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{shell.home / 'mlflow' / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    return {run.info.status for run in client.search_runs(experiments)}


def nothing_is_left(shell: Shell) -> None:
    """The mirror may take over its last events first."""
    deadline = time.monotonic() + 60
    while left := left_over(shell):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def left_over(shell: Shell) -> list[str]:
    """Processes that still name this home in their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if int(place.parent.name) != os.getpid() and any(
            str(shell.home).encode() in word for word in words
        ):
            found.append(b" ".join(words).decode(errors="replace"))
    return found


def test_after_kill_9_the_next_run_goes_on_and_nothing_stays_running(served: Shell) -> None:
    """Case 32."""
    process = served.start(*UP_TO_BASE)
    served.wait_for("stage_started", "base")
    kill_9(process)
    assert "RUNNING" in states(served, "flow_runs")
    since = len(served.events())
    served(*UP_TO_BASE)
    assert served.executed(since) == ["base"]
    assert sorted(states(served, "flow_runs")) == ["COMPLETED", "CRASHED"]
    assert not {"RUNNING", "PENDING"} & set(states(served, "task_runs"))
    assert mlflow_states(served) == {"FINISHED", "KILLED"}
    assert "lost" in served("status")


def test_two_identical_runs_compute_once_and_the_second_outlives_the_first(served: Shell) -> None:
    """Case 31."""
    force = ("run", *NANO, "--set", "seed=1", "--only", "prepare", "--only", "index")
    since = len(served.events())
    both = [served.start(*force) for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output[-2000:]
    assert sorted(map(str, served.executed(since))) == ["index", "prepare"]

    since = len(served.events())
    first = served.start("run", *NANO, "--set", "seed=1", "--only", "base")
    served.wait_for("stage_started", "base", since)
    second = served.start("run", *NANO, "--set", "seed=1", "--only", "base")
    deadline = time.monotonic() + 60
    while len([e for e in served.events()[since:] if e["event"] == "run_started"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill_9(first)
    killed = time.time()
    output, _ = second.communicate(timeout=200)
    assert second.returncode == 0, output[-2000:]
    starts = [e for e in served.events()[since:] if e["event"] == "stage_started"]
    assert len(starts) <= 2 and float(str(starts[-1]["time"])) - killed < 10
    assert served.executed(since) == ["base"]


def test_a_changed_parameter_does_not_collide_in_the_tracker(served: Shell) -> None:
    """Case 37."""
    for size in (5, 6):
        said = served("run", *NANO, "--set", f"data.dev_size={size}", "--only", "prepare")
        assert "MLflow is behind" not in said
    assert "0 events" in served("track", "sync")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_its_workers_and_its_server(
    tmp_path: Path, number: int, code: int
) -> None:
    shell = Shell(tmp_path / "home")
    process = shell.start(*UP_TO_BASE)
    shell.wait_for("stage_started", "base")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output[-2000:]
    assert shell.events()[-1] == {**shell.events()[-1], "event": "run_finished",
                                  "state": "cancelled"}  # fmt: skip
    nothing_is_left(shell)
    assert [e["event"] for e in shell.events()].count("stage_started") == 3
    shell("track", "sync")
    assert mlflow_states(shell) == {"FINISHED", "KILLED"}


def test_kill_9_of_the_command_alone_leaves_no_orphan(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "home")
    process = shell.start(*UP_TO_BASE)
    shell.wait_for("stage_started", "base")
    process.kill()
    process.communicate(timeout=60)
    nothing_is_left(shell)


def test_four_processes_on_a_fresh_home_without_a_network(tmp_path: Path) -> None:
    """Cases 33 and 36. A proxy that is not there stands for the missing network."""
    shell = Shell(tmp_path / "four")
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    environment = {**shell.environment(), **nowhere, "NO_PROXY": "127.0.0.1,localhost"}
    command = shell.command("run", *NANO, "--only", "prepare")
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-2000:]
        for word in ("error", "traceback", "behind", "telemetry"):
            assert word not in output.lower(), output[-2000:]
    assert shell.executed(0) == ["prepare"]
    assert mlflow_states(shell) == {"FINISHED"}


def test_input_that_cannot_be_read_is_an_error_and_never_a_hit(tmp_path: Path) -> None:
    """Case 30."""
    shell = Shell(tmp_path / "home")
    missing = tmp_path / "nothing here"
    files = ("--scale", "smoke", "--set", "data.source=files", "--set", f"data.path={missing}")
    for command in ("run", "plan"):
        assert "nothing here" in shell(command, *files, code=2)
    assert "--set data.path=FOLDER" in shell("plan", *files[:4], code=2)
    assert "unreadable xxx" in shell("plan", *files[:4], "--set", f"data.path={'x' * 900}", code=2)


def test_a_home_that_cannot_be_written_is_named_within_three_seconds(tmp_path: Path) -> None:
    """Case 34."""
    (tmp_path / "file").write_text("")
    shell = Shell(tmp_path / "file" / "home")
    used: list[float] = []
    for _ in range(2):
        started = time.monotonic()
        assert str(shell.home) in shell("run", *NANO, code=2)
        used.append(time.monotonic() - started)
    assert min(used) < 3


def test_a_stage_that_overruns_is_cut_even_in_blocking_code(tmp_path: Path) -> None:
    from moopd.tracking.journal import Journal
    from tasks.children import Children, end_group

    children = Children()
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    process = children.start([sys.executable, "-c", code])
    assert process is not None
    time.sleep(0.5)
    started = time.monotonic()
    end_group(process, grace_s=0.5)
    assert time.monotonic() - started < 5 and process.returncode == -signal.SIGKILL
    children.close()
    assert children.start([sys.executable, "-c", ""]) is None
    Journal(tmp_path, "r").write("run_started")
