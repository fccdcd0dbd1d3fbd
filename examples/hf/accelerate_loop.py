"""Train with accelerate, on two processes: torchrun --nproc-per-node 2 examples/hf/accelerate_loop.py FOLDER"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import unpad.hf

folder = sys.argv[1]
accelerator = Accelerator(cpu=True)
size = accelerator.num_processes
accelerator.gradient_accumulation_steps = accumulate = 4 // size  # an update is four batches, on one process or more
tokenizer = AutoTokenizer.from_pretrained(folder)
data = load_dataset("json", data_files=f"{folder}/conversations.jsonl", split="train")
data = data.map(lambda row: tokenizer.apply_chat_template(row["messages"], return_dict=True))
rows = unpad.hf.Examples(data)
fields = {"gradient_accumulation_steps": accumulate, "rank": accelerator.process_index, "world_size": size}
sampler = unpad.BatchSampler(rows.lengths, targets=rows.targets, tokens=256, **fields)
loader = DataLoader(rows, batch_sampler=sampler, collate_fn=unpad.hf.Collator())  # not for accelerator.prepare
model = unpad.hf.prepare(AutoModelForCausalLM.from_pretrained(folder)).model
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def step(batch):
    accelerator.backward(model(**send_to_device(batch, accelerator.device)).loss)


for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        with accelerator.accumulate(model):
            step(batch)
            optimizer.step()
            optimizer.zero_grad()
accelerator.unwrap_model(model).save_pretrained(f"{folder}/accelerate_loop")
