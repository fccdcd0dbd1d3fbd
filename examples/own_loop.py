"""A training loop of your own on flat batches: a small model learns to sort digits.

python examples/own_loop.py

It needs unpad alone; the rows are drawn. Under a minute on two cores.
"""

import random
from itertools import pairwise

import torch

import unpad
from unpad.models import build_model, model_config

EQUALS, END = 10, 11  # tokens beside the ten digits
EPOCHS = 8


def draw(num: int, seed: int) -> tuple[list[list[int]], list[list[bool]]]:
    """Rows such as 3 1 4 = 1 3 4 END, and which of their tokens count in the loss: those after the equals sign."""
    source = random.Random(seed)
    numbers = [source.choices(range(10), k=source.randint(2, 5)) for _ in range(num)]
    rows = [[*digits, EQUALS, *sorted(digits), END] for digits in numbers]
    return rows, [[False] * (len(digits) + 1) + [True] * (len(digits) + 1) for digits in numbers]


def share_right(model, rows, masks) -> float:
    """Share of the rows of which every token that counts is the likeliest one."""
    with torch.no_grad():
        (batch,) = next(unpad.batches(rows, masks, tokens_per_step=10**6))
        likeliest = model.logits(model(batch)).argmax(-1)  # (total_tokens,)
    wrong = (likeliest != batch.labels) & batch.loss_mask  # labels are the next tokens, shifted within each row
    bounds = batch.layout.cu_seqlens.tolist()  # where rows begin and end
    return sum(not wrong[a:b].any() for a, b in pairwise(bounds)) / len(rows)


torch.manual_seed(0)
sizes = {"preset": "llm", "width": 64, "blocks": 2, "heads": 4, "hidden": 128, "context": 32}
model = build_model(model_config(sizes), 12)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=EPOCHS)
rows, masks = draw(4000, seed=1)
unseen = draw(200, seed=2)

(batch,) = next(unpad.batches(rows[:8], masks[:8]))
print(f"rows of {min(map(len, rows))} to {max(map(len, rows))} tokens in flat batches: no padding")
print(f"a batch is its rows one at a time: {'proved' if unpad.prove(model, batch).passed else 'NOT PROVED'}")
print(f"sorted before training: {share_right(model, *unseen):.0%}")
steps = 0
for epoch in range(EPOCHS):
    for micros in unpad.batches(rows, masks, epoch=epoch, tokens_per_step=512, tokens_per_micro=256):
        targets = sum(batch.num_targets for batch in micros)  # of the whole step
        optimizer.zero_grad()
        for batch in micros:
            total, count = model.losses(batch)["cross_entropy"]  # a sum, not a mean
            (total / targets).backward()
        optimizer.step()
        steps += 1
    schedule.step()
print(f"sorted after {steps} steps, of rows that training never saw: {share_right(model, *unseen):.0%}")
