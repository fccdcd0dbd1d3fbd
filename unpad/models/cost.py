"""Costs of a model: the ratio of a token to a pair of positions that attend, and the operations that training needs.

Operations are the numerator of a share of the machine's peak. They are the matrix products that a model requires, for
real tokens: no padding, no recomputation. The share is thus the part of the machine that did required work.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from unpad.models.contract import Model
from unpad.models.decoder import Decoder
from unpad.nn.activation import GATED
from unpad.nn.block import Attention, BlockConfig


def cells_per_token(model: Model) -> float:
    """Number of pairs of positions that cost as much attention as the rest of one token; infinite without attention.

    Counted in multiplications of training: 6 per weight of a matrix product and token, 12 per channel of the query
    heads and pair, half of them in causal attention (as in `training_operations`). A pair is one of the length**2 of a
    sequence. Every token is taken to pass every matrix, the head over the vocabulary and a vision tower included, and
    attention within a window that is shorter than the longest sequence is counted at the whole window, so that its cost
    is the token's. Attention through inducing points, pooling and pruning grow with the tokens and are left out.

    It only decides how work is shared out; results do not depend on it.
    """
    weights = channels = 0
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            weights += sum(one.numel() for one in module.parameters(recurse=False) if one.dim() > 1)
        if isinstance(module, Decoder) and module.head is None:
            weights += module.embed.weight.numel()
        if isinstance(module, Attention):
            attended = module.heads * module.head_dim
            if module.window is not None and module.window < model.config.longest:
                weights += 2 * attended * module.window
            else:
                channels += attended if module.causal else 2 * attended
    return weights / channels if channels else math.inf


@dataclass(frozen=True)
class LayerSizes:
    """Sizes that determine the number of operations.

    Args:
        block_weights: weights of one block's matrix products.
        blocks: how many.
        attention_width: channels of all query heads together.
        causal: a token attends to no later token.
        head_weights: weights of the product that computes the outputs at target positions.
        input_weights: weights of a product before the blocks, 0 for an embedding: a lookup multiplies nothing.
        windows: tokens seen by each token, one entry per block with windowed attention.
        ending_weights: the last block's weights that only outputs need: in a causal model those after its attention,
            because no token reads another token's output of the last block. 0 if outputs need all tokens.
    """

    block_weights: int
    blocks: int
    attention_width: int
    causal: bool
    head_weights: int
    input_weights: int = 0
    ending_weights: int = 0
    windows: tuple[int, ...] = ()

    def pairs(self, lengths: Sequence[int]) -> int:
        """Pairs of tokens that attend, of all blocks; in causal models both orders of a pair are counted."""
        whole = (self.blocks - len(self.windows)) * sum(length * length for length in lengths)
        return whole + sum(_pairs_within(length, window) for window in self.windows for length in lengths)


def _pairs_within(length: int, window: int) -> int:
    near = min(length, window)
    return near * (2 * length - near)


def sizes_of(config: BlockConfig, outputs: int, input_width: int = 0) -> LayerSizes:
    """Sizes of a stack of blocks with a head of `outputs` channels (for text the vocabulary).

    Args:
        input_width: channels of a product before the blocks; 0 for none.
    """
    width, attended = config.width, config.heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    gated = config.activation in GATED
    ending = attended * width + (3 if gated else 2) * width * config.hidden
    return LayerSizes(
        block_weights=width * (attended + 2 * kv_width) + ending,
        blocks=config.blocks,
        attention_width=attended,
        causal=config.causal,
        head_weights=width * outputs,
        input_weights=input_width * width,
        ending_weights=ending if config.causal and config.blocks else 0,
        windows=tuple(one.window for one in map(config.attention_of, range(config.blocks)) if one.window is not None),
    )


def training_operations(sizes: LayerSizes, lengths: Sequence[int], num_targets: int) -> int:
    """Operations of forward and backward over sequences of these lengths; a multiply-add counts as two.

    A weight takes 2 per token forward and 4 backward (the gradients of input and weight). For an input product the
    gradient of the input is counted too although unused, by the usual rule of 6.
    Attention takes 4 per pair of tokens and channel forward (scores, and values by weights) and twice that backward;
    causal attention half of both. `ending_weights` count at target positions only.

    Args:
        lengths: real tokens per sequence.
        num_targets: positions where the head computes.
    """
    tokens = sum(lengths)
    products = 6 * (sizes.block_weights * sizes.blocks + sizes.input_weights) * tokens
    products -= 6 * sizes.ending_weights * (tokens - num_targets)
    attention = 12 * sizes.attention_width * sizes.pairs(lengths)
    return products + (attention // 2 if sizes.causal else attention) + 6 * sizes.head_weights * num_targets


def reading_operations(sizes: LayerSizes, lengths: Sequence[Sequence[int]], num_outputs: int) -> int:
    """Operations of one forward pass in which blocks may read different numbers of tokens, as after pruning.

    Args:
        lengths: for every block, the tokens of every sequence that enter it.
        num_outputs: positions where the head computes.
    """
    tokens = sum(sum(block) for block in lengths)
    pairs = sum(length * length for block in lengths for length in block)
    attention = 4 * sizes.attention_width * pairs
    products = 2 * sizes.block_weights * tokens + 2 * sizes.input_weights * sum(lengths[0] if lengths else ())
    products -= 2 * sizes.ending_weights * (sum(lengths[-1] if lengths else ()) - num_outputs)
    return products + (attention // 2 if sizes.causal else attention) + 2 * sizes.head_weights * num_outputs


def pruner_operations(width: int, inner: int, visual: Sequence[int], question: Sequence[int]) -> int:
    """Operations of one forward pass of a head that judges visual tokens.

    Args:
        width: channels of hidden states.
        inner: channels inside the head.
        visual, question: tokens of every sample.
    """
    seen, asked = sum(visual), sum(question)
    pairs = sum(v * q for v, q in zip(visual, question, strict=True))
    projections = width * inner * (seen + asked)
    attention = inner * inner * (2 * seen + 2 * asked) + 2 * inner * pairs
    return 2 * (projections + attention + (inner // 2) * (inner + 1) * seen)
