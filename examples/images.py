"""Pictures of any size in one batch: a vision transformer learns five shapes, and names one that it has not seen.

python examples/images.py

It needs unpad alone: 1,500 pictures are drawn once, into ~/.cache/unpad. Under a minute on two cores. For your
own pictures, `data.images=FOLDER` with one sub-folder per class.
"""

import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import unpad
from unpad.evaluation.run import evaluate_run
from unpad.inference.images import classify

with tempfile.TemporaryDirectory() as folder:
    fields = ["train.max_epochs=5", "optim.lr=2e-3"]
    run = unpad.train("images", *fields, out=Path(folder) / "shapes", quiet=True)
    metrics, _ = evaluate_run(str(run.folder))
    accuracy = metrics["accuracy"]
    print(f"{accuracy.num} held-out pictures, each at its own size")
    print(f"named rightly: {accuracy.value:.0%}, 95 % interval {accuracy.low:.0%} to {accuracy.high:.0%}")

    picture = Path(folder) / "mine.png"
    image = Image.new("RGB", (48, 90), "white")
    ImageDraw.Draw(image).ellipse([6, 24, 41, 59], fill=(205, 45, 40))
    image.save(picture)
    (answer,) = classify(run, [picture], top=1)
    print(f"a red disc of 48 x 90 pixels: {answer.top[0][0]}")
