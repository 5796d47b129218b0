"""What a report must own up to: values that differ from the paper's, choices that the paper leaves
open, and limits of what the numbers can say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moopd.config import Scale
from moopd.evaluation.results import Choice
from moopd.systems import CriticSignal, System

_STATED: tuple[tuple[str, object, str], ...] = (
    ("workflow.cascade_steps", 5, "environment steps of the cascade"),
    ("workflow.hierarchy_steps", 12, "environment steps of the hierarchy"),
    ("workflow.leader_rounds", 5, "Leader rounds"),
    ("workflow.max_input_tokens", 8192, "input tokens of a call"),
    ("workflow.max_output_tokens", 512, "output tokens of a call"),
    ("retrieval.top_k", 3, "passages per query"),
    ("training.questions_per_step", 32, "questions per update"),
    ("training.group_size", 5, "workflows per question in training"),
    ("training.num_candidates", 5, "Answerer candidates in training"),
    ("training.num_minibatches", 5, "minibatch updates"),
    ("training.lr", 1e-6, "learning rate"),
    ("training.beta", 0.01, "coefficient of the distillation advantage"),
    ("training.kl_coef", 0.001, "coefficient of the KL penalty"),
    ("training.stage1_steps", 500, "steps of Stage I"),
    ("training.stage2_steps", 500, "steps of Stage II (ablation table)"),
    ("evaluation.attempts", 4, "attempts per question"),
    ("evaluation.sampling.temperature", 0.6, "evaluation temperature"),
    ("evaluation.sampling.top_p", 0.95, "evaluation top-p"),
    ("statistics.num_draws", 4000, "bootstrap draws"),
)
"""(place in the config, the paper's value, name): stated in section 4, A.1-A.3 or B.2."""

LIMITS = (
    "Intervals resample questions for fixed policies. They say nothing about independent training "
    "runs; where several training seeds were run, the spread and the hierarchical intervals do.",
    "Systems run at their own workflow budgets. The budget curves compare saved records at equal "
    "budgets; no system was told its budget.",
    "The ablations used other training batches than the full method.",
    "Reverse KL toward a teacher can reduce exploration.",
    "The teacher was trained on full questions and scores delegated sub-tasks.",
    "Batch duration is not response time per question, and tokens summed over turns count repeated "
    "history again.",
    "Log-ratios of the teacher are its preference, no causal credit for the final answer.",
    "The overlap check finds equal normalised questions. It finds no paraphrase and says nothing "
    "about pretraining.",
    "Exact match judges the answer, not whether the retrieved evidence supports it.",
    "The failure funnel decides by normalised containment: a short answer can stand in a text by "
    "chance, and a paraphrased one is not seen.",
    "The completion bound assumes that every format failure of the other system were right. It is "
    "an assumption and no measured gain.",
    "maj@4 is answer selection over the same four workflows, not a further measurement.",
)

READINGS = (
    "One reward per workflow and role, on all its calls; mean and deviation over the five "
    "workflows of a question, each counted once.",
    "A malformed turn gives -1 to its own owner alone; the final-answer reward, the counted search "
    "steps and the other roles stay as they are. A distilled Searcher gets no -1.",
    "The final-answer reward is the best candidate of the last answering request; malformed "
    "candidates and a missing request count 0. One answering request ends the workflow.",
    "Distillation covers everything a Searcher generated, malformed turns too, and never prompts, "
    "passages, received reports or padding.",
    "The search bonus counts search actions, not distinct queries; a report without a search is "
    "legal and earns none. Repeated queries are reported apart.",
    "A malformed Leader turn, or a dispatch beyond the last round, hands all reports so far to the "
    "Answerer. A malformed Searcher turn spends its step and goes on.",
    "A spent step budget ends the workflow without an answer and without -1.",
    "No report, or none selected, is legal: the Answerer then uses its own knowledge. Unknown "
    "report ids are dropped and counted; the Leader may answer without delegating.",
    "A prompt over the input limit ends the workflow; nothing is cut off its front in silence.",
    "Prompted Critic: the judge sees question, sub-question, report and its passages, no reference "
    "answer; its 0/1 goes to all tokens of the sub-task, grouped over all sub-tasks of a question. "
    "Hints are stored and not fed back.",
    "Outcome-reward Searcher: the final-answer reward, -1 for malformed turns, no KL on it.",
    "Base-model teacher: the base scores the Searchers, the KL keeps the task teacher; its signal "
    "is exactly 0 before the first update.",
    "No direct Searcher loss: its tokens leave policy term, entropy and denominator.",
    "Merged samples and dropped groups keep denominators, weights and entropy as without them.",
)
"""Where two developers could build different things, and what this project built."""


def deviations(scale: Scale) -> tuple[Choice, ...]:
    """Settings whose value is stated in the paper and differs here."""
    found = [
        Choice(item=f"{name} ({place})", used=_shown(value), paper=_shown(paper))
        for place, paper, name in _STATED
        if (value := _at(scale, place)) != paper
    ]
    return (*found, *_parts_that_differ(scale))


def open_choices(
    scale: Scale, systems: Iterable[System], sets: Mapping[str, int]
) -> tuple[Choice, ...]:
    """What the paper leaves open, and what was taken."""
    training, data = scale.training, scale.data
    lines = [
        ("place of the KL penalty", f"{training.kl_placement} normalisation"),
        (
            "group normalisation",
            "(R - mean) / (unbiased std + 1e-6); a lone or equal group gives 0",
        ),
        ("scope of a reward", training.advantage_scope.replace("_", " ")),
        ("clip, dual clip", f"{training.clip_ratio:g}, {training.dual_clip:g}"),
        (
            "entropy coefficient, gradient clip",
            f"{training.entropy_coef:g}, {training.grad_clip:g}",
        ),
        ("loss average", "one token mean over the trained tokens of all roles"),
        ("sampling policy", _old_policy(scale)),
        ("training sampling", _sampling(training.sampling.temperature, training.sampling.top_p)),
        ("development set", f"{data.dev_size} questions, none of them a test question"),
        ("test questions per set", ", ".join(f"{name} {number}" for name, number in sets.items())),
        ("checkpoint", "best: highest development score, earlier step wins ties; ablations: last"),
        ("interval", "percentile of the draws"),
        ("majority vote", "normalised answers; of equal counts the earliest attempt's answer wins"),
        ("encoder and passages", _retrieval(scale)),
        ("cleaning, overlap", f"{data.clean}, {data.overlap}"),
        ("environment step", "one pass over the team up to a retrieval"),
        ("flexible rules", "configs/flexible_extraction.yaml, fixed before scoring"),
        (
            "the five RL search agents",
            "Search-R1, Tree-GRPO, GiGPO, IGPO, Dr. MAS: the list is ours (the texts name "
            "Tree-GRPO alone); those in the table were run, the others were not",
        ),
    ]
    if any(_has_critic(system) for system in systems):
        lines.append(("critic", critic_note(scale)))
    return tuple(Choice(item=item, used=used) for item, used in lines)


def critic_note(scale: Scale) -> str:
    """Who judged reports in the Prompted Critic row; stands wherever its numbers do."""
    if scale.critic.kind == "http":
        return f"judged by {scale.critic.model or 'a model'} behind HTTP"
    warm = "warm-started " if scale.warm_start.enabled else ""
    return f"judged by the frozen {warm}base in its critic role"


def system_notes(system: System | None, scale: Scale | None) -> tuple[str, ...]:
    """Labels that stand beside a row's name."""
    if system is None or scale is None or not _has_critic(system):
        return ()
    return (critic_note(scale),)


def _has_critic(system: System) -> bool:
    return system.train is not None and isinstance(system.train.searcher, CriticSignal)


def _parts_that_differ(scale: Scale) -> Sequence[Choice]:
    found = []
    if scale.model.kind == "tiny" or not (scale.model.path or "").endswith(
        "Qwen3-4B-Instruct-2507"
    ):
        used = "small model trained from scratch" if scale.model.kind == "tiny" else "another model"
        name = f"{used}{f' ({scale.model.path})' if scale.model.path else ''}"
        found.append(Choice(item="backbone", used=name, paper="Qwen3-4B-Instruct-2507"))
    if scale.retrieval.kind != "remote" and scale.retrieval.encoder.kind != "e5":
        found.append(Choice(item="retriever", used=_retrieval(scale), paper="E5"))
    if scale.data.source == "world":
        found.append(
            Choice(item="questions", used="synthetic world", paper="5,000 questions of seven sets")
        )
    if scale.warm_start.enabled:
        found.append(
            Choice(item="base policy", used="warm start on scripted traces", paper="as published")
        )
    engine = "SGLang" if scale.engine.kind == "sglang" else "batched transformers"
    used = f"{engine}, {scale.model.dtype}"
    found.append(Choice(item="rollout engine", used=used, paper="vLLM, float16"))
    return found


def _retrieval(scale: Scale) -> str:
    retrieval = scale.retrieval
    if retrieval.kind == "lexical":
        return "lexical (BM25)"
    if retrieval.kind == "remote":
        return "a retrieval server"
    encoder = retrieval.encoder
    return f"{encoder.model or encoder.kind} encoder, flat inner product"


def _old_policy(scale: Scale) -> str:
    if scale.engine.kind == "local":
        return "log-probabilities of the rollout engine, which samples with the trainer's numerics"
    cap = f"{scale.training.importance_cap:g}"
    return f"recomputed by the trainer, importance weights truncated at {cap}"


def _sampling(temperature: float, top_p: float) -> str:
    return f"temperature {temperature:g}, top-p {top_p:g}"


def _at(scale: Scale, place: str) -> object:
    value: object = scale
    for name in place.split("."):
        value = getattr(value, name)
    return value


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
