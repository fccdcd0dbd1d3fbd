"""Train with Lightning, on two processes: torchrun --nproc-per-node 2 examples/hf/lightning_module.py FOLDER"""

import os
import sys

import torch
from datasets import load_dataset
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import unpad.hf

folder, devices = sys.argv[1], int(os.environ.get("WORLD_SIZE", "1"))  # an update is four batches, on one or more


class Tuned(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder).train()
        unpad.hf.prepare(self.model)

    def train_dataloader(self):  # the sampler is made here, where the processes know each other
        tokenizer = AutoTokenizer.from_pretrained(folder)
        data = load_dataset("json", data_files=f"{folder}/conversations.jsonl", split="train")
        data = data.map(lambda row: tokenizer.apply_chat_template(row["messages"], return_dict=True))
        rows, fields = unpad.hf.Examples(data), {"tokens": 256, "gradient_accumulation_steps": 4 // devices}
        sampler = unpad.BatchSampler(rows.lengths, targets=rows.targets, **fields)
        return DataLoader(rows, batch_sampler=sampler, collate_fn=unpad.hf.Collator())

    def training_step(self, batch, number):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


module, own = Tuned(), {"accelerator": "cpu", "devices": devices, "logger": False, "default_root_dir": folder}
Trainer(max_epochs=2, accumulate_grad_batches=4 // devices, use_distributed_sampler=False, **own).fit(module)
module.model.save_pretrained(f"{folder}/lightning_module")
