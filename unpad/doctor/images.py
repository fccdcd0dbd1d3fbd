"""Findings on pictures with a class each."""

from dataclasses import replace

import numpy as np

from unpad.data.images import ImageData
from unpad.data.measuring import Measuring
from unpad.data.pictures.alike import class_clue
from unpad.doctor.finding import Finding, Found, Words, finding
from unpad.doctor.rows import cut_short, label_fields, labelled, of_rows, sampled
from unpad.doctor.subject import Subject
from unpad.evaluation.classes import ClassPredictions, predict


def look(subject: Subject[ImageData]) -> list[Finding]:
    """Findings on the sequences of the stage."""
    return [*of_rows(subject, labelled(subject)), *shortcut(subject), *cut_short(subject), *learnt(subject)]


MOST_READ = 500  # pictures of either part
LEAST_HELD = 5  # pictures of a class; fewer may be missed by chance


def learnt(subject: Subject[ImageData]) -> list[Finding]:
    """Findings on what a run says of its held-out pictures, and of training ones as they are in their files."""
    data, stage = subject.data, subject.stage
    if subject.folder is None or not stage.held_out_ids.size:
        return []
    album = replace(data.album, settings=data.album.settings.plain(), resized=np.zeros_like(data.album.resized))
    trained, held = (
        predict(Measuring(subject.model, replace(data, album=album), sampled(ids, MOST_READ), subject.recipe.plan))
        for ids in (stage.train_ids, stage.held_out_ids)
    )
    return [*never_predicted(held, data.classes), *gap(trained, held)]


@finding("never_predicted",
    en=("The class {target!r} is never predicted, though {number:.0f} of {num:,} held-out pictures are of it.",
        "give it more pictures, or join it with the class that it is taken for, {other!r}"),
    zh=("类别 {target!r} 从未被预测，尽管 {num:,} 张验证图像中有 {number:.0f} 张属于它。",
        "为它补充图像，或与它被误认成的类别 {other!r} 合并"))  # fmt: skip
def never_predicted(held: ClassPredictions, classes: tuple[str, ...]) -> Found | None:
    """The largest class that is predicted for no held-out picture."""
    counts = np.bincount(held.labels, minlength=len(classes))
    counts[held.chosen] = 0
    lost = int(counts.argmax())
    if counts[lost] < LEAST_HELD:
        return None
    other = int(np.bincount(held.chosen[held.labels == lost]).argmax())
    return Found(counts[lost], "data.images", target=classes[lost], other=classes[other], num=len(held.labels))


@finding("gap", "note",
    en=("The run is right in {number:.0%} of the pictures that it trained on and in {held:.0%} of the held-out ones: "
        "it knows the first by heart.",
        "give more pictures of other things, change them more (images.color), or start from trained "
        "weights: train.init_from=RUN"),
    zh=("该运行对训练过的图像正确率为 {number:.0%}，对验证图像为 {held:.0%}：它记住了前者。",
        "补充不同的图像，加强变化（images.color），或从训练好的权重开始：train.init_from=RUN"))  # fmt: skip
def gap(trained: ClassPredictions, held: ClassPredictions) -> Found | None:
    """Accuracy on training pictures far above that on held-out ones, by more than two standard errors of the latter."""
    seen, new = float(trained.right.mean()), float(held.right.mean())
    if seen - new < max(0.2, 2 * (new * (1 - new) / len(held.labels)) ** 0.5):
        return None
    return Found(seen, "data.images", "images.color", "train.init_from", held=new)


PROPERTIES: dict[str, Words] = {
    "size": ("The size of a picture", "图像大小"),
    "mode": ("The colour mode of a picture", "颜色模式"),
    "kind of file": ("The kind of file", "文件格式"),
}


@finding("shortcut",
    en=("{what} alone tells the class of {number:.0%} of the pictures: with {shown} it is {target!r}. A model may "
        "learn only that.", "bring the files of all classes into one form"),
    zh=("仅凭{what}就能说出 {number:.0%} 图像的类别：{shown} 就是 {target!r}。", "让各类的文件形式一致"))  # fmt: skip
def shortcut(subject: Subject[ImageData]) -> Found | None:
    """The size, the mode or the kind of the file alone tells the class."""
    clue = class_clue([subject.data.examples[seq] for seq in subject.stage.train_ids.tolist()])
    if clue is None:
        return None
    what = PROPERTIES[clue.name]
    return Found(clue.share, *label_fields(subject), what=what, shown=clue.value, target=clue.label)
