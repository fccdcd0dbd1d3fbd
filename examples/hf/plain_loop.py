"""Train in a plain loop: torchrun --nproc-per-node 2 examples/hf/plain_loop.py FOLDER"""

import os
import sys

import torch
from datasets import load_dataset
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import unpad
import unpad.hf
