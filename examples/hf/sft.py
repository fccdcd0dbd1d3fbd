"""Tune a model on replies with SFTTrainer and our batches: python examples/hf/sft.py FOLDER"""

import sys

try:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing; install what this needs: pip install 'unpad[hf]' trl datasets")

import unpad.hf

folder = sys.argv[1] if len(sys.argv) > 1 else sys.exit(__doc__)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
data = load_dataset("json", data_files=f"{folder}/conversations.jsonl", split="train").train_test_split(0.1, seed=0)
args = SFTConfig(
    output_dir=f"{folder}/tuned", packing=True, max_length=512, assistant_only_loss=True, bf16=False,
    per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=1, learning_rate=1e-3,
    report_to=[], save_strategy="no", logging_steps=10, dataloader_pin_memory=False,
)  # fmt: skip
trainer = SFTTrainer(
    model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer
)
unpad.hf.attach(trainer, tokens_per_micro=512)
trainer.train()
print(trainer.evaluate()["eval_loss"])
