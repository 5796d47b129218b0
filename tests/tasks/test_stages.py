"""Rules: the order of the chain, what a part of it needs, and which seed a stage runs with."""

from __future__ import annotations

from moopd.config import load_scale
from moopd.systems import load_systems
from tasks.home import CONFIGS, ROOT
from tasks.stages import SOURCES, Stage, levels, pipeline

SYSTEMS = load_systems(CONFIGS / "systems.yaml")


def stages(*wanted: str, seeds: int = 1, overrides: tuple[str, ...] = ()) -> list[Stage]:
    scale = load_scale(CONFIGS / "scale" / "smoke.yaml", overrides)
    return pipeline(scale, SYSTEMS, wanted or tuple(SYSTEMS), seeds)


def names(found: list[Stage]) -> list[str]:
    return [stage.name for stage in found]


def test_a_student_alone_brings_its_teacher_but_not_the_teachers_evaluation() -> None:
    assert names(stages("multiagent_opd")) == [
        "prepare", "index", "base",
        "train/cmas_rl", "freeze/cmas_rl", "train/multiagent_opd", "freeze/multiagent_opd",
        "evaluate/multiagent_opd", "evaluate/multiagent_opd_last",
        "statistics", "report",
    ]  # fmt: skip


def test_untrained_rows_need_the_base_alone() -> None:
    found = stages("hmas_base")
    assert names(found) == ["prepare", "index", "base", "evaluate/hmas_base", "statistics",
                            "report"]  # fmt: skip
    assert found[3].needs == ("prepare", "index", "base")


def test_levels_keep_the_longest_way_and_independent_rows_side_by_side() -> None:
    order = [sorted(names(level)) for level in levels(stages())]
    assert order[:3] == [["prepare"], ["index"], ["base"]]
    assert order[3] == ["evaluate/cmas_base", "evaluate/hmas_base", "train/cmas_rl"]
    assert order[4] == ["freeze/cmas_rl"]
    students = [name for name in SYSTEMS if SYSTEMS[name].train and name != "cmas_rl"]
    assert {f"train/{name}" for name in students} <= set(order[5])
    assert order[-2:] == [["statistics"], ["report"]]


def test_levels_of_a_part_leave_out_what_is_not_in_it() -> None:
    part = [s for s in stages("cmas_rl") if s.kind in ("train", "evaluate")]
    assert [names(level) for level in levels(part)] == [["train/cmas_rl", "evaluate/cmas_rl"]]
    assert levels([]) == []


def test_seeds_count_up_from_the_scales_and_data_keep_theirs() -> None:
    by_name = {s.name: s for s in stages("multiagent_opd", seeds=3, overrides=("seed=40",))}
    assert [by_name[f"train/multiagent_opd{end}"].seed for end in ("", "/1", "/2")] == [40, 41, 42]
    assert [by_name[f"evaluate/multiagent_opd{end}"].run for end in ("", "/1", "/2")] == [0, 1, 2]
    assert by_name["prepare"].seed == by_name["base"].seed == 40
    needs = set(by_name["statistics"].needs)
    assert {"freeze/multiagent_opd/2", "evaluate/multiagent_opd_last/1"} <= needs


def test_the_base_model_as_teacher_is_not_frozen_again() -> None:
    by_name = {stage.name: stage for stage in stages()}
    base_teacher = by_name["train/opd_base_teacher"]
    assert base_teacher.teachers == {"base": "base", "cmas_rl": "freeze/cmas_rl"}
    assert base_teacher.needs.count("base") == 1


def test_the_judge_is_read_by_the_row_that_is_judged_alone() -> None:
    judged = {s.name for s in stages() if "critic" in s.reads}
    assert judged == {"train/prompted_critic"}


def test_sources_of_keys_exist() -> None:
    """A place that was renamed would be an empty digest: no change of code would be seen."""
    for places in SOURCES.values():
        for place in places:
            assert (ROOT / place).is_file() or list((ROOT / place).rglob("*.py")), place
