"""The adversary of pruning, which compares the text of a pruned pass with that of the whole pass, block by block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.models.vision_language.losses import Discriminator, TextPool, adversarial, discriminator_terms
from unpad.models.vision_language.prune_config import DiscriminatorConfig
from unpad.models.vision_language.prune_pass import BlockRecord
from unpad.models.vision_language.visual import Visual, cells, is_text
from unpad.nn.block import Between
from unpad.nn.losses import Terms

TERMS = ("adversarial", "discriminator")  # terms that train
ACCURACIES = ("real_accuracy", "fake_accuracy")  # terms that are only reported


class Adversary(nn.Module):
    """A discriminator of pooled text, and the selection of its inputs.

    Args:
        config: blocks that it compares.
        width: channels of hidden states.
        blocks: of the language model.
    """

    def __init__(self, config: DiscriminatorConfig, width: int, blocks: int) -> None:
        super().__init__()
        self.reinit, self.layers = config.reinit, sorted({layer % blocks for layer in config.layers})
        self.judge, self.pool = Discriminator(width, len(self.layers), config.inner), TextPool()

    def begin_step(self) -> list[nn.Parameter]:
        """Reinitialize the weights if due; return the reinitialized parameters."""
        if self.reinit == 0 or float(torch.rand(())) >= self.reinit:
            return []
        self.judge.reinitialise()
        return list(self.judge.parameters())

    def watch(self, batch: RaggedBatch, visual: Visual, inner: Between | None = None) -> BlockRecord:
        """Record the text's states of a pass over this batch at the blocks that the discriminator compares."""
        return BlockRecord(self.layers, is_text(batch, visual.index).nonzero().flatten(), inner)

    def terms(self, batch: RaggedBatch, visual: Visual, real: BlockRecord, fake: BlockRecord) -> Terms:
        """`discriminator`, `adversarial` and the accuracies, over the samples with visual tokens.

        Args:
            batch, visual: of the whole pass.
            real, fake: records of the whole pass, without gradient, and of the pruned pass.
        """
        rows = cells(batch.layout)
        layout = rows.keep(is_text(batch, visual.index))
        seqs = rows.seq_of_token()[visual.index].unique()

        def pooled(seen: BlockRecord) -> Tensor:
            return torch.stack([self.pool(states, layout) for states in seen.states], 1).index_select(0, seqs)

        of_whole, of_pruned = pooled(real), pooled(fake)  # (num_samples, layers, width)
        judged = discriminator_terms(self.judge, of_whole, of_pruned)
        return {**judged, "adversarial": adversarial(self.judge, of_pruned)}
