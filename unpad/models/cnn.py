"""A small convolutional classifier of images resized to one square, the baseline for models of any size.

A sequence is one image with one token; the token's vector holds all pixels. Without statistics over the batch, an
image's result does not depend on the rest of the batch.
"""

from itertools import pairwise
from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, required
from unpad.models.contract import Classifier, ModelConfig
from unpad.nn.block import init_weights
from unpad.nn.draws import draw, dropout
from unpad.nn.linear import Linear
from unpad.nn.precision import wide_dtype

CHANNELS = (16, 32, 64, 128)

DATA = "images"


class Config(ModelConfig):
    """The `model` section of a recipe."""

    kind: Literal["cnn"] = "cnn"
    patch: int = Field(64, ge=16, multiple_of=16)
    """Side of the square that images are, in pixels."""
    channels: Literal[3, 4] = 3
    """Of a pixel: red, green and blue on white; 4 with opacity."""
    dropout: float = Field(0.5, ge=0, lt=1)
    """On the features before the head."""

    @property
    def longest(self) -> int:
        """Largest number of tokens of one image."""
        return 1


class Cnn(Classifier):
    """Four convolutions, each with ReLU and a max-pool of 2, the average over places, and a head over classes.

    Args:
        config: side of the images, dropout.
        num_classes: rows of the head.
    """

    config: Config

    def __init__(self, config: Config, num_classes: int) -> None:
        super().__init__()
        self.config, self.num_classes = config, num_classes
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise((config.channels, *CHANNELS))
        )
        self.head = Linear(CHANNELS[-1], num_classes, bias=False)
        init_weights(self, 0)
        for convolution in self.convolutions:  # without norms the signal must keep its scale (He et al. 2015)
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")

    def forward(self, batch: RaggedBatch) -> Tensor:
        """Features of every image, (total_tokens, 128), in the computing dtype."""
        side, pixels = self.config.patch, required(batch.inputs_embeds)
        # The weights' dtype: fp32 pixels must not limit an fp64 model.
        x = pixels.to(self.head.weight.dtype).unflatten(1, (self.config.channels, side, side))
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)  # (total_tokens, channels, side / 2, side / 2), and so on
        return x.mean((2, 3), dtype=wide_dtype(x.dtype)).to(x.dtype)

    def _features(self, batch: RaggedBatch) -> Tensor:
        """Input of the head for every image, (num_seqs, 128), in the computing dtype."""
        # With one token per image, the mean over tokens only leaves out the padding of a rectangle.
        features = super()._features(batch)
        share = self.config.dropout if self.training else 0.0
        return dropout(features, share, draw(), batch.layout.bases) if share else features
