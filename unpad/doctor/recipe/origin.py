"""The run that a recipe starts from: prefixes of roles, colours and rates that its weights have learnt with."""

from __future__ import annotations

from unpad.doctor.subject import Subject
from unpad.errors import UnpadError
from unpad.interchange.origin import is_folder
from unpad.recipes.recipe import Recipe, stages_of
from unpad.run.folder import find_run, run_recipe
from unpad.terminal.finding import Finding, Value

OTHER_COLOURS = 0.4  # relative difference of images.std, and that of images.mean
FASTER, FASTER_PAIRS = 10.0, 5.0  # times the rate of that run


def check_origin(subject: Subject) -> list[Finding]:
    """Findings on a recipe whose weights are those of another run; none where that run is gone."""
    recipe = subject.setup.recipe
    name = recipe.train.init_from
    if name is None or is_folder(name):
        return []
    try:
        origin = run_recipe(find_run(name))
    except UnpadError:  # a run goes on though the one that it began from is gone
        return []
    field = "model.from" if "from" in recipe.model else "train.init_from"
    return [*_template(recipe, origin, field), *_colours(subject, origin, field), *_rate(subject, origin, field)]


def _template(recipe: Recipe, origin: Recipe, field: str) -> list[Finding]:
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
    """A stage whose rate is far above that at which its weights were learnt; adapters begin anew."""
    recipe = subject.setup.recipe
    before = max(one.recipe.optim.lr * one.recipe.optim.lr_scale for one in stages_of(origin))
    for stage in [] if recipe.lora is not None else subject.setup.stages:
        times = stage.recipe.optim.lr * stage.recipe.optim.lr_scale / before
        if not stage.train_ids.size or stage.recipe.train.max_epochs == 0:
            continue
        if times >= (FASTER_PAIRS if stage.of_pairs else FASTER):
            lr = recipe.field_of(stage.name, "optim.lr")
            values: dict[str, Value] = {"rate": times * before, "before": before, "field": lr, "usual": before / 10}
            return [Finding("faster_than_origin", "warning", times, (lr, "optim.lr", field), values)]
    return []
