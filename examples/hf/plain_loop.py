"""Train in a loop of torch, on two processes: torchrun --nproc-per-node 2 examples/hf/plain_loop.py FOLDER"""

import sys

import torch
from datasets import load_dataset
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import unpad.hf

folder = sys.argv[1]
distributed.init_process_group("gloo")
accumulate = 4 // distributed.get_world_size()  # an update is four batches, on one process or on more
tokenizer = AutoTokenizer.from_pretrained(folder)
data = load_dataset("json", data_files=f"{folder}/conversations.jsonl", split="train")
data = data.map(lambda row: tokenizer.apply_chat_template(row["messages"], return_dict=True))
rows = unpad.hf.Examples(data)
sampler = unpad.BatchSampler(rows.lengths, targets=rows.targets, tokens=256, gradient_accumulation_steps=accumulate)
loader = DataLoader(rows, batch_sampler=sampler, collate_fn=unpad.hf.Collator())
model = AutoModelForCausalLM.from_pretrained(folder)
unpad.hf.prepare(model)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(batch):
    (parallel(**batch).loss / accumulate).backward()


for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, batch in enumerate(loader, 1):
        step(batch)
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
model.save_pretrained(f"{folder}/plain_loop")
