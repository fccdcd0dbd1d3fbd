"""`unpad doctor`: the checks in the order in which they depend on each other, and their result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from unpad.doctor.catalogue import CATALOGUE
from unpad.doctor.data.rows import check_rows, check_targets
from unpad.doctor.files import check_files
from unpad.doctor.lines import drawing, fact_lines, finding_lines
from unpad.doctor.recipe.aims import check_aims
from unpad.doctor.recipe.course import check_course, check_origin
from unpad.doctor.recipe.settings import (
    check_betas,
    check_clip,
    check_decay,
    check_dropout,
    check_eps,
    check_schedule,
    check_shapes,
    check_step_size,
)
from unpad.doctor.subject import Subject, TimeBudget, open_subject
from unpad.doctor.trials.carry import STEPS, Carry, Transfer, carry_over, judge_carry
from unpad.doctor.trials.layers import Layers, check_layers, check_terms, check_unchanged
from unpad.doctor.trials.overfit import LEAST_STEPS, Overfit, judge, overfit_batch
from unpad.doctor.trials.steps import (
    Steps,
    System,
    check_memory,
    check_neighbours,
    check_threads,
    check_times,
    take_steps,
)
from unpad.doctor.trials.sweep import LEAST, Sweep, sweep
from unpad.doctor.words import Language, sentences, word
from unpad.machine.load import LoadMeter
from unpad.terminal.finding import Finding, Value, ranked
from unpad.terminal.progress import progress
from unpad.terminal.table import wrapped

SECONDS = 120.0
OF_STEPS, OF_SWEEP, OF_OVERFIT, OF_CARRY = 0.2, 0.4, 0.5, 0.7  # of the time that is left
# Findings that say no more than others do: by code, the codes that each explain it.
SETTINGS = {
    "clip", "decay", "dropout", "eps", "betas", "stale", "smoothing", "loss_weight", "frozen_at_start", "step_size",
    "class_weight",
}  # fmt: skip
FOLLOWS = {
    "by_heart_settings": {*SETTINGS, "lr_high", "lr_low", "frozen"},
    "setting": SETTINGS,
    "by_heart": {
        "constant_inputs",
        "one_set",
        "frozen",
        "dead_units",
        "clashing_labels",
        "one_patch",
        "two_answers",
        *SETTINGS,
    },
    "labels_random": {
        "constant_inputs",
        "constant_labels",
        "imbalance",
        "no_history",
        "rare_codes",
        "values_in_codes",
        "marked_region",
        "clashing_labels",
        "one_patch",
        "picture_scale",
        "augmentation",
        "slipped_pictures",
        "without_picture",
        "lone_classes",
        "other_classes",
        "lost_aspect",
        "pictures_apart",
        "map_reversed",
        "beyond_follow_up",
        "one_set",
        *SETTINGS,
    },
    "decay": {"lr_high", "step_size"},
    "step_size": {"lr_high"},
    "clashing_labels": {"lost_pictures"},
    "clip": {"loss_weight", "class_weight"},
    "exploding": {"loss_weight", "class_weight"},
    "starved": {"loss_weight"},
    "frozen": {"frozen_at_start", "values_in_codes"},
    "rare_codes": {"values_in_codes"},
    "constant_labels": {"clashing_labels"},
    "repeats": {"clashing_labels", "too_often"},
    "near_rows": {"same_rows", "grown_rows"},
    "few_held_out": {"not_held_out"},
    "cut_alike": {"padded_text", "wrapped_lines"},
    "common_part": {"repeats_question", "unread_text", "padded_text"},
    "imbalance": {"constant_labels", "beyond_follow_up"},
    "leaking_value": {"one_set"},
    "one_time": {"one_set"},
    "slipped_pictures": {"pictures_apart"},
    "given_answer": {"repeats_question"},
    "reply_elsewhere": {"told_apart", "slipped"},
    "run_spikes": {"chosen_unlearned"},
    "changed_words": {"escaped", "no_text", "read_as", "bytes_as_letters"},
    "escaped": {"no_text"},
    "two_answers": {"slipped", "other_replies", "swapped_roles", "roles_alike"},
    "other_marks": {"repeats_question"},
    "sides_apart": {"held_out_unlike", "other_classes", "far_values", "stand_in", "two_scales", "rare_codes"},
    "two_scales": {"far_values", "dates_as_values"},
    "stand_in": {"far_values", "dates_as_values"},
}
FOLLOWS["labels_flipped"] = FOLLOWS["labels_random"]


class FamilyChecks(Protocol):
    """Members of a module such as `doctor/images.py`, named after the family that it checks; see `checks_of`."""

    def check_originals(self, subject: Subject[Any]) -> list[Finding]:
        """Findings on the rows as the data files have them."""

    def check_sequences(self, subject: Subject[Any]) -> list[Finding]:
        """Findings on the sequences of the stage, one by one and beside each other."""

    def transfer(self, subject: Subject[Any]) -> Transfer | None:
        """The way to judge what the model overfit; None where there is none."""


def checks_of(subject: Subject) -> FamilyChecks:
    """The module with the checks of the subject's family, or with those of any family where it has none."""
    has_own = (Path(__file__).parent / f"{subject.data.family}.py").is_file()
    return import_module(f"unpad.doctor.{subject.data.family if has_own else 'any_family'}")


@dataclass(frozen=True)
class Tried:
    """Copies of the model, trained for some steps each, and what that showed."""

    findings: list[Finding]
    steps: Steps
    sweep: Sweep
    overfit: Overfit
    carry: Carry | None


@dataclass(frozen=True)
class Examination:
    """Findings by rank, and what they rest on."""

    subject: Subject
    findings: list[Finding]
    layers: Layers
    tried: Tried | None
    threads: int
    cores: int
    seconds: float

    @property
    def sweep(self) -> Sweep | None:
        return None if self.tried is None else self.tried.sweep

    @property
    def troubles(self) -> list[Finding]:
        """Findings above a note."""
        return [found for found in self.findings if found.severity != "note"]

    def lines(self, language: Language) -> list[str]:
        """The examination as text."""
        subject, num = self.subject, len(self.troubles)
        parameters = sum(p.numel() for p in subject.model.parameters())
        names: dict[str, Value] = {"name": subject.name, "stage": subject.stage.name}
        head = word("subject", language, parameters=parameters, steps=subject.num_steps, **names)
        if subject.folder is not None:
            head += word("of_run", language, step=subject.step)
        verdict = word("nothing" if num == 0 else "one_trouble" if num == 1 else "troubles", language, number=num)
        lines = wrapped(head)
        if subject.other_stages:
            others = ", ".join(subject.other_stages)
            lines += wrapped(word("others", language, others=others, stage=subject.stage.name))
        if subject.stage.of_pairs:
            lines += wrapped(word("of_pairs", language))
        lines.append(word("seconds", language, verdict=verdict, number=self.seconds))
        for number, found in enumerate(self.findings, 1):
            lines += ["", *finding_lines(number, found, language)]
        lines += ["", word("looked", language), *fact_lines(self._facts(language))]
        if self.sweep is not None and len(self.sweep.rates):
            lines += ["", *drawing(self.sweep, subject.rate, language)]
        return lines

    def _facts(self, language: Language) -> list[tuple[str, str]]:
        subject, facts = self.subject, list[tuple[str, str]]()
        if self.tried is not None:
            overfit, found = self.tried.overfit, self.tried.sweep
            values = {
                "start": overfit.start,
                "end": overfit.end,
                "steps": overfit.steps,
                "sequences": overfit.sequences,
            }
            facts.append((word("heart", language), word("heart_value", language, **values)))
            if found.low is not None and found.high is not None:
                range_of = {"rate": subject.rate, "low": found.low, "high": found.high}
                facts.append((word("rate", language), word("rate_value", language, **range_of)))
            facts += _time_facts(self.tried.steps, language)
            norm = {"norm": self.layers.norm, "blocks": len(self.layers.blocks)}
            facts.append((word("norm", language), word("norm_value", language, **norm)))
        kernels = subject.setup.environment["kernels"]
        cores = word("cores_value", language, threads=self.threads, cores=self.cores, kernels=kernels)
        return [*facts, (word("cores", language), cores)]

    def to_json(self, language: Language) -> dict[str, Any]:
        """Findings and measurements for programs."""
        findings = [
            {
                "code": found.code,
                "severity": found.severity,
                "number": found.number,
                "fields": list(found.fields),
                "values": found.values,
                "reason": sentences(found, language)[0],
                "do": sentences(found, language)[1],
            }
            for found in self.findings
        ]
        known = {"name": self.subject.name, "stage": self.subject.stage.name, "step": self.subject.step}
        blocks = [dict(zip(("name", "output", "gradient"), one, strict=True)) for one in self.layers.blocks]
        layers = {"gradient": self.layers.norm, "blocks": blocks}
        tried = {} if self.tried is None else _measured(self.tried, self.subject.rate)
        return {**known, "seconds": self.seconds, "findings": findings, "layers": layers, **tried}


def _time_facts(steps: Steps, language: Language) -> list[tuple[str, str]]:
    """Seconds of a step, and the shares of its parts."""
    whole = max(steps.compute, 1e-9)
    values = {name: getattr(steps, name) / whole for name in ("forward", "backward", "optimize", "load")}
    said = word("step_value", language, seconds=whole, **values)
    return [(word("step", language), said), (word("saved", language), word("saved_value", language, save=steps.save))]


def _measured(tried: Tried, rate: float) -> dict[str, Any]:
    """Measurements of the trials as JSON values."""
    found, carry = tried.sweep, tried.carry
    rates = {"rates": found.rates.tolist(), "losses": found.losses.tolist(), "low": found.low, "high": found.high}
    return {
        "steps": vars(tried.steps),
        "sweep": {**rates, "recipe": rate},
        "by_heart": {**vars(tried.overfit), "learnt": tried.overfit.learnt},
        "labels": None if carry is None else vars(carry),
    }


def examine(
    name: str, overrides: Sequence[str] = (), seconds: float = SECONDS, system: System | None = None
) -> Examination:
    """Examine a recipe, or a run by its directory or name; writes nothing.

    Args:
        overrides: `key=value` changes of the recipe.
        seconds: for all of it, about.
        system: readings of the machine; default those of this one.

    Raises:
        RecipeError, SourceError, CheckpointError: it cannot be trained or used at all.
    """
    system = system or System()
    clock = TimeBudget(seconds, system.now)
    meter = LoadMeter(system.busy_seconds, system.own_seconds, clock.now)
    with progress("reading the data"):
        subject = open_subject(name, overrides, clock)
    with progress("looking at the data"):
        family = checks_of(subject)
        findings = family.check_originals(subject)
        if not subject.stage.of_pairs:  # the replies of a pair share their prompt
            findings += [*check_targets(subject), *check_rows(subject)]
            findings += [*family.check_sequences(subject), *check_shapes(subject)]
    findings += [*check_schedule(subject), *check_decay(subject), *check_betas(subject), *check_step_size(subject)]
    findings += [*check_aims(subject), *check_files(subject), *check_course(subject), *check_origin(subject)]
    layers = check_layers(subject)
    findings += layers.findings
    tried = _tried(subject, system, meter, layers) if layers.finite else None
    if tried is not None:
        findings += tried.findings
    ordered = ranked(_causes(findings), list(CATALOGUE))
    return Examination(subject, ordered, layers, tried, system.threads(), system.cores(), clock.spent)


def _tried(subject: Subject, system: System, meter: LoadMeter, layers: Layers) -> Tried:
    """Train copies of the model for some steps each."""
    clock = subject.clock
    steps = take_steps(subject, clock.share(OF_STEPS))
    found = sweep(subject, clock.share(OF_SWEEP))
    overfit = overfit_batch(subject, found, clock.share(OF_OVERFIT))
    transfer = checks_of(subject).transfer(subject)
    carry = None if transfer is None else carry_over(subject, transfer, found, clock.share(OF_CARRY))
    load = meter.read()
    findings = [
        *check_times(subject, steps),
        *check_terms(subject),
        *check_clip(subject, steps.norms),
        *check_eps(subject, steps.norms),
        *check_unchanged(subject, layers, steps.unmoved),
        *judge(subject, overfit, found),
        *check_dropout(subject, overfit),
        *(judge_carry(subject, carry) if carry is not None else []),
        *check_threads(subject, system, load),
        *check_neighbours(load, system.cores()),
        *check_memory(system),
        *check_length(subject, found, overfit, carry),
    ]
    return Tried(findings, steps, found, overfit, carry)


def _causes(findings: list[Finding]) -> list[Finding]:
    """Leave out what only follows from a finding that says why, and that is no note."""
    codes = {found.code for found in findings if found.severity != "note"}
    return [found for found in findings if found.code not in FOLLOWS or not codes & FOLLOWS[found.code]]


ROUND = 10  # seconds
MORE = 1.5  # times the time that is reckoned, as machines slow down


def check_length(subject: Subject, found: Sweep, overfit: Overfit, carry: Carry | None) -> list[Finding]:
    """Notes on trials that were too short to be judged."""
    findings = []
    if found.short:
        findings.append(_short("short_sweep", subject, found.short, LEAST))
    if overfit.is_short:
        findings.append(_short("short_heart", subject, overfit.steps, LEAST_STEPS))
    if carry is not None and carry.is_short:
        findings.append(_short("short_labels", subject, carry.steps, STEPS))
    return findings


def _short(code: str, subject: Subject, taken: int, least: int) -> Finding:
    given = subject.clock.seconds
    wanted = given * max(MORE * least / max(taken, 1), 2.0)
    return Finding(code, "note", taken, ("--seconds",), {"least": least, "seconds": ROUND * math.ceil(wanted / ROUND)})
