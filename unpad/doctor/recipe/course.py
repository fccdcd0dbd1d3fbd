"""The course of a run: the run that it starts from, stages that are not tried here, data that none of them uses, rows
that were left out, when a stage ends, and how replies are made of what was learnt.
"""

from __future__ import annotations

import numpy as np

from unpad.data.family import family_of, not_held_out
from unpad.doctor.recipe.aims import MUCH_SMOOTHED
from unpad.doctor.subject import Subject
from unpad.errors import UnpadError
from unpad.interchange.origin import is_folder
from unpad.recipes.data import KINDS
from unpad.recipes.recipe import Recipe, stages_of
from unpad.run.folder import find_run, run_recipe
from unpad.terminal.finding import Finding, Severity, Value
from unpad.training.length import course
from unpad.training.stage import StageSetup, epoch_plan, epochs_per_evaluation, last_step, stage_epochs

OTHER_COLOURS = 0.4  # relative difference of images.std, and that of images.mean
QUICKER, QUICKER_PAIRS = 10.0, 5.0  # times the rate of that run


def check_origin(subject: Subject) -> list[Finding]:
    """Findings on a recipe with the weights of another run; none where that run is gone."""
    recipe = subject.setup.recipe
    name = recipe.train.init_from
    if name is None or is_folder(name):
        return []
    try:
        origin = run_recipe(find_run(name))
    except UnpadError:  # a run goes on though the one that it began from is gone
        return []
    field = "model.from" if "from" in recipe.model else "train.init_from"
    return [*_origin_template(recipe, origin, field), *_colours(subject, origin, field), *_rate(subject, origin, field)]


def _origin_template(recipe: Recipe, origin: Recipe, field: str) -> list[Finding]:
    theirs, ours = origin.data.template, recipe.data.template
    differing = [part for part in ("user", "assistant", "system", "separator")
                 if getattr(theirs, part) != getattr(ours, part)]  # fmt: skip
    if not differing or not origin.data.converses or not recipe.data.converses:
        return []
    part = differing[0]
    values: dict[str, Value] = {"part": part, "ours": getattr(ours, part), "theirs": getattr(theirs, part)}
    fields = (*(f"data.template.{one}" for one in differing), "data.template", "train.init_from", field)
    return [Finding("other_template", "warning", len(differing), fields, values)]


def _colours(subject: Subject, origin: Recipe, field: str) -> list[Finding]:
    ours, theirs = subject.setup.recipe.images, origin.images
    apart = max(abs(one / other - 1) for one, other in zip(ours.std, theirs.std, strict=True))
    apart += max(abs(one - other) for one, other in zip(ours.mean, theirs.mean, strict=True))
    if subject.data.augmentation != "images" or apart < OTHER_COLOURS:
        return []
    values: dict[str, Value] = {"mean": str(list(ours.mean)), "std": str(list(ours.std))}
    values |= {"their_mean": str(list(theirs.mean)), "their_std": str(list(theirs.std))}
    return [Finding("other_colours", "warning", apart, ("images.mean", "images.std", "train.init_from", field), values)]


def _rate(subject: Subject, origin: Recipe, field: str) -> list[Finding]:
    """A stage with a rate far above that at which its weights were learnt; adapters begin anew."""
    recipe = subject.setup.recipe
    before = max(one.recipe.optim.lr * one.recipe.optim.lr_scale for one in stages_of(origin))
    for stage in [] if recipe.lora is not None else subject.setup.stages:
        times = stage.recipe.optim.lr * stage.recipe.optim.lr_scale / before
        if not stage.train_ids.size or stage.recipe.train.max_epochs == 0:
            continue
        if times >= (QUICKER_PAIRS if stage.of_pairs else QUICKER):
            lr = recipe.field_of(stage.name, "optim.lr")
            values: dict[str, Value] = {"rate": times * before, "before": before, "field": lr, "usual": before / 10}
            return [Finding("faster_than_origin", "warning", times, (lr, "optim.lr", field), values)]
    return []


SOON, LEAST_PATIENT = 0.1, 30  # share of the stage, and steps, that training waits for progress
MANY_BAD, MOSTLY_BAD = 0.1, 0.4  # of the rows
MANY_EPOCHS, TOO_MANY = 200, 1000
OVERLAP, MUCH_OVERLAP = 5.0, 32.0  # windows in which a token is learnt
FASTER, MUCH_FASTER = 10.0, 50.0  # times the rate of the stage before it
LARGE_RATE = 0.05
GROWN = 0.5  # share of an epoch that a step may grow to
HOT, REPEATS = 2.0, 2.0  # temperature, and penalty of what was said
TALL = 0.9  # of the replies, that are longer than what is generated
LORA_SCALE = 64.0
LEARNT_IN_ORDER, UNDOES = ("text", "chat", "pairs"), 0.3  # kinds, and steps times rate over those of an earlier stage


def check_course(subject: Subject) -> list[Finding]:
    """Findings on the stages of a recipe and on what stands before and after them."""
    return [
        *_unused(subject),
        *_later(subject),
        *_without_step(subject),
        *_order(subject),
        *_ends(subject),
        *_epochs(subject),
        *_windows(subject),
        *_grown(subject),
        *_not_held_out(subject),
        *_template(subject),
        *_generation(subject),
        *_adapters(subject),
    ]


def _unused(subject: Subject) -> list[Finding]:
    """Kinds of data that the recipe names and no stage uses, or only one that takes no step."""
    recipe = subject.setup.recipe
    used = {kind for stage in subject.setup.stages if stage.recipe.train.max_epochs != 0 for kind in stage.kinds}
    left = [kind for kind in KINDS if recipe.data.sources(kind) and kind not in used and kind != "events"]
    skipped = [stage for stage in subject.setup.stages if stage.recipe.train.max_epochs == 0]
    if not left or skipped:
        return []
    return [Finding("unused", "warning", len(left), (f"data.{left[0]}", "stages"), {"kind": left[0]})]


def check_left_out(subject: Subject, bad: int, whole: int) -> list[Finding]:
    """A finding on rows that were quarantined, `bad` of `whole` rows."""
    share = bad / max(whole, 1)
    if share < MANY_BAD:
        return []
    severity: Severity = "fault" if share >= MOSTLY_BAD else "warning"
    kind = subject.stage.kinds[0]
    fields = ("data.max_bad", "data.on_bad_row", f"data.{kind}")
    return [Finding("many_bad", severity, share, fields, {"rows": whole, "kind": kind})]


def _later(subject: Subject) -> list[Finding]:
    """Stages that are not tried: their rate against that of the one before them, and their steps."""
    names = [stage.name for stage in subject.setup.stages]
    before, found, steps_of = subject.rate, list[Finding](), course(subject.setup.stages)
    for stage in subject.setup.stages[names.index(subject.stage.name) + 1 :]:
        if not stage.train_ids.size or stage.recipe.train.max_epochs == 0:
            continue
        optim = stage.recipe.optim
        rate, of = optim.lr * optim.lr_scale, subject.setup.recipe.field_of
        times = rate / before
        if times >= FASTER or rate >= LARGE_RATE > before:
            own = [of(stage.name, f"optim.{name}") for name in ("lr_scale", "lr")]
            field = next((name for name in own if name.startswith("stages.")), own[0])
            values: dict[str, Value] = {"stage": stage.name, "rate": rate, "before": before, "field": field}
            severity: Severity = "fault" if times >= MUCH_FASTER else "warning"
            found.append(Finding("later_rate", severity, times, (field, *own), values))
        elif times <= 1 / 5000:
            own = [of(stage.name, f"optim.{name}") for name in ("lr_scale", "lr")]
            values = {"stage": stage.name, "rate": rate, "before": before, "field": own[0]}
            found.append(Finding("later_slow", "warning", times, tuple(own), values))
        smoothing = stage.recipe.train.label_smoothing
        if smoothing >= MUCH_SMOOTHED and not stage.of_pairs:
            field = of(stage.name, "train.label_smoothing")
            found.append(Finding("smoothing", "warning", smoothing, (field,), {"field": field}))
        steps = steps_of[stage.name]
        if steps.is_short:
            fields = (of(stage.name, "plan.tokens_per_step"), of(stage.name, steps.longer))
            values = {"field": fields[0], "longer": fields[1], "stage": stage.name}
            found.append(Finding("later_few_steps", "warning", steps.num_steps, fields, values))
        before = max(before, rate)
    return found


def _without_step(subject: Subject) -> list[Finding]:
    """Stages that take no step: they have no data, or train.max_steps ends the run before they begin.

    A stage with max_epochs=0 is left out on purpose. One with patience may end before its last step.
    """
    recipe, steps_of, found = subject.setup.recipe, course(subject.setup.stages), list[Finding]()
    earlier = ""
    severity: Severity = "warning"
    for stage in subject.setup.stages:
        if stage.recipe.train.max_epochs == 0:
            continue
        kind, values = stage.kinds[0], dict[str, Value]({"stage": stage.name})
        if stage.name not in steps_of:
            names = (f"data.{kind}", f"stages.{stage.name}.use", "stages")
            found.append(Finding("stage_without_data", "warning", 0, names, {**values, "kind": kind}))
        elif earlier and _is_over(stage, first := steps_of[stage.name].first):
            field = recipe.field_of(earlier, "train.max_epochs")
            fields = ("train.max_steps", field, "stages", f"stages.{stage.name}")
            values |= {"earlier": earlier, "field": field}
            found.append(Finding("stage_without_step", severity, first, fields, values))
        else:
            earlier = stage.name
            severity = "note" if stage.recipe.train.patience is not None else severity
    return found


def _is_over(stage: StageSetup, first: int) -> bool:
    """True if the steps of the run are done before a stage."""
    most = stage.recipe.train.max_steps
    return most is not None and first >= most


def _order(subject: Subject) -> list[Finding]:
    """A stage of plain text after one of conversations, or one of either after one of pairs, that is as long as a
    third of it: it undoes what was learnt last."""
    found, before = list[Finding](), list[tuple[int, str, str, int, float]]()
    for stage in subject.setup.stages:
        kinds = [kind for kind in stage.kinds if kind in LEARNT_IN_ORDER]
        plan = epoch_plan(stage, 0) if stage.train_ids.size and stage.recipe.train.max_epochs != 0 else None
        if not kinds or plan is None or not plan.num_steps:
            continue
        last = max(kinds, key=LEARNT_IN_ORDER.index)
        at, steps = LEARNT_IN_ORDER.index(last), last_step(stage, 0, stage_epochs(stage, plan))
        rate = stage.recipe.optim.lr * stage.recipe.optim.lr_scale
        undone = [one for one in before if one[0] > at and steps * rate >= UNDOES * one[3] * one[4]]
        if undone and not found:
            _, name, kind, own_steps, _ = undone[-1]
            fields = ("stages", f"stages.{stage.name}.use", f"stages.{name}.use")
            values: dict[str, Value] = {"stage": stage.name, "kind": last, "earlier": name, "other": kind}
            found.append(Finding("stage_order", "warning", steps, fields, {**values, "steps": own_steps}))
        before.append((at, stage.name, last, steps, rate))
    return found


def _ends(subject: Subject) -> list[Finding]:
    """Patience that ends within a small part of the stage, by the chance of an evaluation."""
    train, steps = subject.recipe.train, subject.num_steps
    if train.patience is None or not subject.stage.held_out_ids.size:
        return []
    an_epoch = subject.plan.num_steps * epochs_per_evaluation(subject.stage, stage_epochs(subject.stage, subject.plan))
    waits = train.patience * (train.eval_every or an_epoch)
    if waits >= min(max(SOON * steps, LEAST_PATIENT / 3), LEAST_PATIENT) or waits >= steps / 5:
        return []
    fields = (subject.field("train.patience"), subject.field("train.eval_every"))
    values: dict[str, Value] = {"patience": train.patience, "steps": steps, "field": fields[0]}
    return [Finding("impatient", "warning", waits, fields, values)]


def _epochs(subject: Subject) -> list[Finding]:
    """Passes over the same rows, where nothing ends the stage before it overfits them."""
    epochs = subject.num_steps / max(subject.plan.num_steps, 1)
    if epochs < MANY_EPOCHS or subject.recipe.train.patience is not None:
        return []
    ends = dict.fromkeys((*subject.longer, subject.field("train.max_epochs"), "train.max_steps"))
    fields = (*ends, subject.field("train.patience"))
    values: dict[str, Value] = {"sequences": len(subject.stage.train_ids), "field": subject.longer[0]}
    return [Finding("many_epochs", "warning" if epochs >= TOO_MANY else "note", epochs, fields, values)]


def _windows(subject: Subject) -> list[Finding]:
    """Windows of long texts that overlap nearly whole: an epoch learns each token as often as they do."""
    settings, table = subject.recipe.plan, subject.data.table
    whole = int(np.minimum(table.positions[subject.stage.train_ids], 1 << 40).sum())
    times = float(subject.plan.pieces.lengths.sum()) / max(whole, 1)
    if settings.stride is None or times < OVERLAP:
        return []
    field = subject.field("plan.stride")
    values: dict[str, Value] = {"stride": settings.stride, "field": field}
    return [Finding("overlap", "fault" if times >= MUCH_OVERLAP else "warning", times, (field,), values)]


def _grown(subject: Subject) -> list[Finding]:
    """Steps that grow to most of an epoch."""
    settings, whole = subject.recipe.plan, int(subject.plan.pieces.lengths.sum())
    largest = max(settings.grow.values(), default=0)
    if largest < GROWN * whole:
        return []
    field = subject.field("plan.grow")
    values: dict[str, Value] = {"tokens": whole, "field": field}
    return [Finding("grown", "warning", largest, (field,), values)]


def _not_held_out(subject: Subject) -> list[Finding]:
    """A kind of data with nothing held out, though a share of it is asked for."""
    recipe, data = subject.setup.recipe, subject.data
    used = [kind for kind in data.kinds if any(kind in stage.kinds for stage in subject.setup.stages)]
    for kind in used if recipe.data.holdout else []:
        cause = not_held_out(recipe, data, kind)
        if cause is not None:
            what = cause.what.rstrip(".")
            fields = (f"data.{kind}", "data.holdout", "data.separator")
            return [Finding("not_held_out", "warning", recipe.data.holdout, fields, {"what": what})]
    return []


def _template(subject: Subject) -> list[Finding]:
    """Prefixes of the two roles that do not tell them apart."""
    data = subject.setup.recipe.data
    template = data.template
    if data.converses and template.user.strip() and not (template.assistant + template.separator).strip():
        return [
            Finding("no_prefix", "warning", 1.0, ("data.template.assistant", "data.template"), {"shown": template.user})
        ]
    if not data.converses or template.user.strip() != template.assistant.strip():
        return []
    fields = ("data.template", "data.template.assistant", "data.template.user")
    return [Finding("one_role", "warning", 1.0, fields, {"shown": template.user})]


def _generation(subject: Subject) -> list[Finding]:
    """Settings with which replies are not what the model has learnt."""
    settings, data = subject.setup.recipe.generate, subject.data
    if family_of(subject.setup.recipe).NO_TEXT is not None:
        return []
    found: list[tuple[str, float, str]] = []
    if settings.temperature >= HOT:
        found.append(("temperature", settings.temperature, "0.7"))
    if settings.repetition_penalty >= REPEATS or settings.repetition_penalty <= 1 / REPEATS:
        found.append(("repetition_penalty", settings.repetition_penalty, "1.1"))
    if settings.top_p <= 0.05 and settings.temperature > 0:
        found.append(("top_p", settings.top_p, "0.9"))
    replies = [data.kinds.index(kind) for kind in ("chat", "vqa") if kind in data.kinds]
    targets = data.table.num_targets[np.isin(data.table.kind, replies)]
    if len(targets) and float((targets > 2 * settings.max_new_tokens).mean()) >= TALL:
        found.append(("max_new_tokens", settings.max_new_tokens, str(int(np.quantile(targets, 0.95)))))
    return [
        Finding("generation", "warning", number, (f"generate.{name}",), {"field": f"generate.{name}", "usual": usual})
        for name, number, usual in found
    ]


def _adapters(subject: Subject) -> list[Finding]:
    """The factor on the output of adapters."""
    lora = subject.setup.recipe.lora
    if lora is None or 1 / LORA_SCALE < lora.scaling < LORA_SCALE:
        return []
    return [Finding("lora_scale", "warning", lora.scaling, ("lora.alpha", "lora.r"), {"usual": 2 * lora.r})]
