"""Train with Trainer, on two processes: torchrun --nproc-per-node 2 examples/hf/trainer.py FOLDER"""

import os
import sys

try:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments  # isort: skip
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing; install what this needs: pip install 'unpad[hf]' datasets")

import unpad.hf

folder = sys.argv[1] if len(sys.argv) > 1 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder)


def tokenize(row):
    return tokenizer.apply_chat_template(row["messages"], return_dict=True)


data = load_dataset("json", data_files=f"{folder}/conversations.jsonl", split="train")
data = data.map(tokenize, remove_columns=data.column_names).train_test_split(0.1, seed=0)
accumulate = 4 // int(os.environ.get("WORLD_SIZE", "1"))  # an update is 16 rows, on one process or on more
args = TrainingArguments(
    output_dir=f"{folder}/trainer", per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
    use_cpu=True, num_train_epochs=2, learning_rate=1e-3, report_to=[], save_strategy="no",
    logging_steps=10, dataloader_pin_memory=False,
)  # fmt: skip
trainer = Trainer(
    model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)  # fmt: skip
unpad.hf.attach(trainer, tokens_per_micro=320)
trainer.train()
trainer.save_model(f"{folder}/trainer")
print(trainer.evaluate()["eval_loss"])
