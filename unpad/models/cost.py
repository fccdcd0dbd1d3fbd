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
    heads and pair, half of them in causal attention (as in `reading_operations`). A pair is one of the length**2 of a
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
    )


def reading_operations(sizes: LayerSizes, lengths: Sequence[Sequence[int]], num_outputs: int) -> int:
    """Operations of one forward pass in which blocks may read different numbers of tokens, as after pruning.

    A multiply-add counts as two: 2 per weight and token, and 4 per pair of tokens and channel of attention (scores, and
    values by weights), half of them in causal attention. `ending_weights` count for outputs only. A step of training
    takes three times as many: the backward pass computes the gradients of both factors of every product, also of an
    input where it is unused, by the usual rule of 6 per weight and token.

    Args:
        lengths: for every block, the tokens of every sequence that enter it.
        num_outputs: positions where the head computes.
    """
    tokens = sum(sum(block) for block in lengths)
    attention = 4 * sizes.attention_width * sum(length * length for block in lengths for length in block)
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
