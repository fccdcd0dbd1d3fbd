"""Shapes and sums of masks of a batch, for `--verbose`."""

import re
from io import StringIO

import pytest
import torch
from rich.console import Console

from tests.conftest import random_batch
from tests.helpers.patients import random_patients
from tests.helpers.toy import rows, write_toy
from unpad.batching.batch import describe_batch
from unpad.training.loop import train


def test_every_tensor_is_named_with_its_shape_and_masks_with_their_sum():
    batch = random_batch([3, 9, 5])
    lines = describe_batch(batch)
    assert lines[0] == f"3 sequences, {batch.total_tokens} tokens, the longest {int(batch.layout.lengths().max())}"
    assert f"input_ids ({batch.total_tokens},) int64" in lines
    assert f"loss_mask ({batch.total_tokens},) bool, {int(batch.loss_mask.sum())} True" in lines
    assert "layout.cu_seqlens (4,) int32" in lines
    padded = describe_batch(batch.pad())
    longest = int(batch.layout.lengths().max())
    assert f"layout.attention_mask (3, {longest}) bool, {batch.total_tokens} True" in padded


def test_parts_of_a_family_are_named_too():
    lines = describe_batch(random_patients([4, 2]))
    assert any(re.fullmatch(r"EventSets.has_value \(6,\) bool, \d True", line) for line in lines), lines
    assert any("members.cu_seqlens" in line for line in lines)


@pytest.mark.promise("run.verbose")
@pytest.mark.slow
def test_verbose_training_shows_them_under_every_step(tmp_path):
    recipe, out = write_toy(tmp_path / "toy"), StringIO()
    train(str(recipe), tmp_path / "loud", ["train.max_steps=2"], console=Console(file=out, width=300), verbose=True)
    micros = re.findall(r"^  micro-batch \d+: \d+ sequences, (\d+) tokens", out.getvalue(), re.M)
    targets = re.findall(r"^  micro-batch \d+: loss_mask \(\d+,\) bool, (\d+) True", out.getvalue(), re.M)
    trained = rows(tmp_path / "loud", "train")
    assert sum(map(int, micros)) == sum(row["padded_tokens"] for row in trained)
    assert sum(map(int, targets)) == sum(row["targets"] for row in trained)
    quiet = StringIO()
    train(str(recipe), tmp_path / "calm", ["train.max_steps=2"], console=Console(file=quiet, width=300))
    assert "micro-batch 1:" not in quiet.getvalue()
    assert torch.is_grad_enabled()
