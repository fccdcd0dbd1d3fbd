"""Every kind of model keeps the contract, and does what its capabilities say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch
from unpad.batching.batch import RaggedBatch
from unpad.models import build_model, contract, model_config, model_kinds
from unpad.models.contract import (
    Classifies,
    Generates,
    HasLatent,
    Model,
    PredictsSets,
    PrunesTokens,
    ReadsCodeVectors,
    ReadsTokens,
    ScoresTokens,
)
