"""A second set of trainers as people write them, and what `unpad.hf.attach` makes of each.

    python benchmarks/attach_unseen_2.py                     # all of them, about two minutes on one core
    python benchmarks/attach_unseen_2.py alpaca resumes      # some, with tracebacks and whole messages
    python benchmarks/attach_unseen_2.py --tokens 4096       # where an update is one micro-batch

They were written without sight of the code of `unpad.hf` and of the proof, and their truths were compared with the
trainers before any was attached. Three were changed after their first verdict: the rows of `tools_and_system`, and the
second ones of `two_stages`, do not fit into the six micro-batches of 48 tokens that an update had, so it has six of 64;
and `last_update_is_smaller` asked for updates of six and four rows, as padded batches have: micro-batches hold tokens,
so now each update is judged by the rows that it has. With `--tokens 4096` an update of `resumes` is a whole epoch,
which its check takes too. `attach_judge.py` says how they are judged.
"""

from __future__ import annotations

import copy
import json

from attach_judge import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    IGNORED,
    PAD,
    QUIET,
    SEP,
    SHARP,
    TOLERANCE,
    UNK,
    USER,
    VOCAB,
    WIDTH,
    Case,
    Example,
    Ids,
    Measures,
    Run,
    after,
    arguments,
    astray,
    batch_of,
    case_of,
    descent,
    folder,
    learns_all,
    lm_collator,
    logits_of,
    losses_of,
    main,
    model,
    next_losses,
    padded,
    plain,
    predictions,
    setup,
    sft,
    sft_arguments,
    table,
    text,
    token_mean,
    tokenizer,
    towards,
    true_gradient,
    whole,
    with_prompts,
    words,
)

# The judge comes first: it sets the environment that transformers reads.
# isort: split

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset, interleave_datasets
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl import SFTTrainer

CALL, DONE = VOCAB, VOCAB + 1  # special tokens that a script adds


# Tokens, templates and text


@setup("keep")
def learns_added_tokens() -> Case:
    """Two tokens added, a tied embedding resized, and a hook on its gradient that lets the new rows alone learn."""
    tok, made = tokenizer(), model("Qwen2", tie_word_embeddings=True)
    tok.add_tokens(["<call>", "<done>"], special_tokens=True)
    made.resize_token_embeddings(len(tok), mean_resizing=False)
    made.requires_grad_(False)
    weight = made.get_input_embeddings().weight.requires_grad_(True)
    is_new = (torch.arange(len(tok)) >= CALL)[:, None]
    weight.register_hook(lambda grad: grad * is_new)
    rows = [[*row[:2], CALL, *row[2:-1], DONE, EOS] for row in words()]

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        grad = torch.autograd.grad(learns_all(m, rows), m.get_input_embeddings().weight)[0]
        return (m.get_input_embeddings().weight * grad * is_new).sum()

    return Case(plain(Trainer, made, arguments(), rows), loss, rows)


AGENT = (
    "{{ '<bos> ' }}{% for tool in tools or [] %}{{ '<sep> ' + tool['function']['name'] + ' ' }}{% endfor %}"
    "{% for message in messages %}{{ '<' + message['role'] + '> ' if message['role'] != 'system' else '' }}"
    "{{ message['content'] + ' <end> ' }}{% endfor %}{% if thinking %}{{ '<unk>' }}{% endif %}"
)


@setup("keep")
def tools_and_system() -> Case:
    """Conversations with tools, a system message in some, and a variable of the template in each row."""
    tok, talks, tools, kwargs, ids = tokenizer(chat_template=AGENT), [], [], [], []
    tok.chat_template = AGENT
    for index, row in enumerate(words(low=6)):
        system, question, answer = row[1:3], row[3:5], row[5:-1]
        names = [f"w{20 + index}", "w40"][: index % 3]
        talk = [{"role": "user", "content": text(question)}, {"role": "assistant", "content": text(answer)}]
        talks.append([{"role": "system", "content": text(system)}, *talk] if index % 2 else talk)
        tools.append(json.dumps([{"type": "function", "function": {"name": name}} for name in names]))
        kwargs.append({"thinking": index % 4 == 0})
        listed = [token for name in names for token in (SEP, int(name[1:]))]
        opening = [*system, END] if index % 2 else []
        closing = [UNK] if index % 4 == 0 else []
        ids.append([BOS, *listed, *opening, USER, *question, END, ASSISTANT, *answer, END, *closing])
    data = Dataset.from_dict({"messages": talks, "tools": tools, "chat_template_kwargs": kwargs})
    trainer = SFTTrainer(model("Qwen3"), sft_arguments(), None, data, processing_class=tok)
    return case_of(trainer, whole(ids), tokens_per_micro=64)


@setup("keep")
def sharegpt() -> Case:
    """Conversations of two turns under names of another program, mapped, and packed by TRL."""
    rows = words(24, low=3, high=9)
    talks, ids = [], []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        says = [("human", first[1:3]), ("gpt", first[3:-1]), ("human", second[1:3]), ("gpt", second[3:-1])]
        talks.append([{"from": who, "value": text(part)} for who, part in says])
        ids.append([token for who, part in says for token in (USER if who == "human" else ASSISTANT, *part, END)])

    def renamed(row: dict) -> dict:
        names = {"human": "user", "gpt": "assistant"}
        return {"conversations": [{**one, "from": names[one["from"]]} for one in row["conversations"]]}

    data = Dataset.from_dict({"conversations": talks}).map(renamed)
    args = sft_arguments(20, 1, packing=True)
    return case_of(SFTTrainer(model("Mistral"), args, None, data, processing_class=tokenizer()), whole(ids))


@setup("keep")
def chat_completions() -> Case:
    """Prompts and completions as messages, cut to 14 tokens: what is left without an answer is dropped."""
    questions, answers, examples = [], [], []
    for index, row in enumerate(words(16, low=6)):
        cut = 13 if index % 4 == 0 and len(row) > 16 else 3
        question, answer = row[1:cut], row[cut:-1]
        questions.append([{"role": "user", "content": text(question)}])
        answers.append([{"role": "assistant", "content": text(answer)}])
        labels = [*[IGNORED] * (len(question) + 3), *answer, END][:14]
        if len(question) + 3 < 14:
            examples.append(([USER, *question, END, ASSISTANT, *answer, END][:14], labels))
    assert len(examples) < len(questions)
    data = Dataset.from_dict({"prompt": questions, "completion": answers})
    args = sft_arguments(2, -(-len(examples) // 2), max_length=14)
    return case_of(SFTTrainer(model("Gemma"), args, None, data, processing_class=tokenizer()), examples)


@setup("keep")
def formats_instructions() -> Case:
    """`formatting_func`, an end token of one's own, padding to multiples of 8, a model with a window of eight."""
    rows = words(low=8)

    def formatted(row: dict) -> str:
        return f"<user> {row['instruction']} <sep> {row['input']} <assistant> {row['output']} "

    parts = {"instruction": [row[1:4] for row in rows], "input": [row[4:6] for row in rows]}
    parts["output"] = [row[6:-1] for row in rows]
    data = Dataset.from_dict({name: [text(part) for part in some] for name, some in parts.items()})
    ids = [[USER, *row[1:4], SEP, *row[4:6], ASSISTANT, *row[6:-1], END] for row in rows]
    args = sft_arguments(eos_token="<end>", pad_to_multiple_of=8)
    made = model("Phi3", sliding_window=8)
    trainer = SFTTrainer(made, args, None, data, processing_class=tokenizer(), formatting_func=formatted)
    return case_of(trainer, whole(ids))


@setup("keep")
def packs_completions() -> Case:
    """Token ids with a mask of the completion, packed to train and not packed to evaluate."""
    rows, some = words(), words(8, 31)

    def masked(them: list[Ids]) -> tuple[Dataset, list[Example]]:
        examples = [(row, [IGNORED] * (len(row) // 2) + row[len(row) // 2 :]) for row in them]
        mask = [[int(label != IGNORED) for label in labels] for _, labels in examples]
        return table(them, completion_mask=mask), examples

    (data, examples), (held_out, others) = masked(rows), masked(some)
    packing = {"packing": True, "eval_packing": False, "per_device_eval_batch_size": 8}
    args = sft_arguments(20, 1, completion_only_loss=True, **packing)
    trainer = SFTTrainer(model("Llama"), args, None, data, held_out, processing_class=tokenizer())

    def measured(m: PreTrainedModel) -> Measures:
        return {"eval_loss": token_mean(m, others).item()}

    return case_of(trainer, examples, measure=lambda one: one.evaluate(), measured=measured)


# Data


@setup("keep")
def interleaves_sources() -> Case:
    """Two sources interleaved by probabilities, with a column of names, in the order of the mixture."""
    sources = {"web": words(14, 41), "books": words(9, 42)}
    mixed = interleave_datasets(
        [table(rows, source=[name] * len(rows)) for name, rows in sources.items()], probabilities=[0.6, 0.4], seed=5
    )
    rows = list(mixed["input_ids"])
    assert len(set(mixed["source"][:8])) == 2

    def check(run: Run, _: PreTrainedModel) -> str:
        for step, begin in enumerate((0, 4)):
            if sorted(run.sequences(step)) != sorted(rows[begin : begin + 4]):
                return f"update {step + 1} has other rows than the mixture"
        return ""

    args = arguments(2, 2, max_steps=2, train_sampling_strategy="sequential")
    trainer = Trainer(model("StableLm"), args, lm_collator(), mixed)
    return Case(trainer, lambda m, _: learns_all(m, rows[:4]), rows[:4], check)


@setup("keep")
def blocks_of_text() -> Case:
    """Documents written behind each other and cut into blocks of 16, which are rows of equal length."""
    stream = [token for row in words(20) for token in row]
    blocks = [stream[at : at + 16] for at in range(0, len(stream) - 15, 16)]
    data = table(blocks, attention_mask=[[1] * 16] * len(blocks), labels=blocks)
    args = arguments(2, -(-len(blocks) // 2))
    return case_of(Trainer(model("GPTNeoX"), args, default_data_collator, data), whole(blocks))


@setup("keep")
def alpaca() -> Case:
    """Lists of tensors one behind the other, and a collator that pads with the end token and masks what equals it."""
    rows = with_prompts(words())
    examples = [(row, after(row, SEP)) for row in rows]
    items = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)} for ids, labels in examples]

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        ids, labels = ([row[name] for row in features] for name in ("input_ids", "labels"))
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=EOS)
        labels = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        return {"input_ids": ids, "labels": labels, "attention_mask": ids.ne(EOS)}

    trainer = Trainer(model("Olmo2"), arguments(), collate, ConcatDataset([items[:5], items[5:]]))
    return Case(trainer, lambda m, _: token_mean(m, examples))  # the padded update sees more end tokens


@setup("keep")
def tokenizes_on_access() -> Case:
    """`set_transform` that tokenizes a template when rows are read, with answers alone learnt."""
    rows, made = words(low=6), tokenizer()
    data = Dataset.from_dict({"question": [text(row[1:4]) for row in rows], "answer": [text(row[4:]) for row in rows]})

    def encoded(batch: dict) -> dict:
        questions = [made(f"<bos> <user> {one} <assistant>")["input_ids"] for one in batch["question"]]
        answers = [made(f"{one} <eos>")["input_ids"] for one in batch["answer"]]
        both = list(zip(questions, answers, strict=True))
        return {
            "input_ids": [one + two for one, two in both],
            "attention_mask": [[1] * len(one + two) for one, two in both],
            "labels": [[IGNORED] * len(one) + two for one, two in both],
        }

    data.set_transform(encoded)
    args = arguments(remove_unused_columns=False)
    trainer = Trainer(model("Falcon"), args, DataCollatorForSeq2Seq(made, pad_to_multiple_of=8), data)
    examples = [([BOS, USER, *row[1:4], ASSISTANT, *row[4:]], [*[IGNORED] * 6, *row[4:]]) for row in rows]
    return case_of(trainer, examples)


@setup("keep")
def positions_of_left_padding() -> Case:
    """A collator that pads on the left and counts the positions of a model that has a table of them."""
    rows = words()

    def collate(features: list[dict]) -> dict[str, torch.Tensor]:
        ids = [row["input_ids"] for row in features]
        mask = padded([[1] * len(row) for row in ids], 0, left=True)
        return {
            "input_ids": padded(ids, PAD, left=True),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "labels": padded([[IGNORED, *row[1:]] for row in ids], IGNORED, left=True),
        }

    made = model("GPTBigCode", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return case_of(Trainer(made, arguments(), collate, table(rows)), whole(rows))


# Models and what of them learns


@setup("keep")
def lora_with_whole_modules() -> Case:
    """LoRA beside an embedding and a head that learn in full, with reentrant checkpointing."""
    rows = words()
    whole_modules = ["embed_tokens", "lm_head"]
    config = LoraConfig(target_modules=["v_proj"], modules_to_save=whole_modules, init_lora_weights=False)
    made = get_peft_model(model("Gemma", tie_word_embeddings=False), config)
    args = arguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    return case_of(plain(Trainer, made, args, rows), whole(rows))


class Anchored(Trainer):
    """Stays near the model without its adapter."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        seen = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad(), model.disable_adapter():
            base = model(**seen).logits.log_softmax(-1)
        apart = F.kl_div(outputs.logits.log_softmax(-1), base, reduction="none", log_target=True).sum(-1)
        real = inputs["labels"][:, 1:] != IGNORED
        loss = outputs.loss + 0.5 * apart[:, :-1][real].sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def stays_near_its_base() -> Case:
    """A divergence from the same model with its adapter switched off."""
    rows = words()
    config = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row in rows:
            ours = logits_of(m, row)[:-1].log_softmax(-1)
            with torch.no_grad(), m.disable_adapter():
                base = logits_of(m, row)[:-1].log_softmax(-1)
            parts.append(-ours[range(len(row) - 1), row[1:]] + 0.5 * (base.exp() * (base - ours)).sum(-1))
        return torch.cat(parts).mean()

    return Case(plain(Anchored, get_peft_model(model("Qwen2"), config), arguments(), rows), loss, rows)


@setup("keep")
def biases_of_alibi() -> Case:
    """BLOOM, whose attention falls with the distance, and of which the biases alone learn."""
    rows, made = words(), model("Bloom")
    for name, value in made.named_parameters():
        value.requires_grad_(name.endswith("bias"))
    return case_of(plain(Trainer, made, arguments(), rows), whole(rows))


@setup("keep")
def experts() -> Case:
    """GPT-OSS: four experts of which two are used, sinks, windows of six tokens, no balancing."""
    rows = words()
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 8}
    layers["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    made = model("GptOss", num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager", **layers)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        m.set_experts_implementation("eager")  # the kernel for groups of experts knows no fp64
        return learns_all(m, rows)

    return Case(plain(Trainer, made, arguments(), rows), loss, rows)


@setup("keep")
def dropout_of_attention() -> Case:
    """Dropout in the attention alone, judged by how far gradients in fp64 are from the one without it."""
    rows = words()

    def check(run: Run, m: PreTrainedModel) -> str:
        def flat(grads: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.cat([value.flatten() for value in grads.values()])

        without = flat(true_gradient(m, learns_all(m, rows)))
        m.train()
        far = [(flat(true_gradient(m, learns_all(m, rows))) - without).norm() for _ in range(8)]
        found = float((flat(run.grads) - without).norm() / torch.stack(far).mean())
        return "" if 0.8 < found < 1.2 else f"{found:.2f} of the distance that dropout makes"

    return Case(plain(Trainer, model("Qwen2", attention_dropout=0.2), arguments(), rows), None, rows, check)


@setup("keep")
def half_precision() -> Case:
    """`bf16=True`: autocast, whose gradient is near the one in fp64."""
    rows = words()

    def check(run: Run, m: PreTrainedModel) -> str:
        truth = true_gradient(m, learns_all(m, rows))
        ours, theirs = (torch.cat([one[name].flatten() for name in truth]) for one in (run.grads, truth))
        error = float((ours - theirs).norm() / theirs.norm())
        return "" if 1e-4 < error < 3e-2 else f"an error of {error:.1e} of the whole gradient"

    return Case(plain(Trainer, "Qwen3", arguments(bf16=True), rows), None, rows, check)


# The loop, its callbacks and checkpoints


@setup("keep")
def last_update_is_smaller() -> Case:
    """Two epochs of ten rows, with clipping: the last update of each epoch is a smaller one."""
    rows = words(10)
    args = arguments(2, 3, max_steps=-1, num_train_epochs=2, learning_rate=SHARP, max_grad_norm=0.5)
    trainer = plain(Trainer, "Starcoder2", args, rows)

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        truth = true_gradient(m, learns_all(m, seen))
        norm = float(torch.stack([value.norm() for value in truth.values()]).norm())
        m.zero_grad()
        return towards(m, {name: value * min(1.0, 0.5 / norm) for name, value in truth.items()})

    def check(run: Run, m: PreTrainedModel) -> str:
        updates = [run.sequences(step) for step in range(len(run.steps) - 1)]
        half = len(updates) // 2
        epochs = [[row for some in part for row in some] for part in (updates[:half], updates[half:])]
        if any(sorted(epoch) != sorted(rows) for epoch in epochs):
            return f"an epoch does not see each row once, by updates of {[len(some) for some in updates]} rows"
        *_, end = descent(copy.deepcopy(m), updates, learns_all, clip=0.5)
        return astray(run.trainer.model, end, m)

    return Case(trainer, loss, None, check)


@setup("keep")
def resumes() -> Case:
    """A checkpoint after each update, and a second training that goes on from the first of them."""
    rows, place = words(), folder()
    saving = {"output_dir": place, "save_strategy": "steps", "save_steps": 1}
    args = arguments(2, 3, max_steps=2, learning_rate=SHARP, data_seed=11, **saving)
    trainer = plain(Trainer, "Qwen3", args, rows)

    def train(one: Trainer) -> None:
        one.train()
        one.save_model(f"{place}/end")
        one.train(resume_from_checkpoint=f"{place}/checkpoint-1")

    def check(run: Run, m: PreTrainedModel) -> str:
        first, second, again = (run.sequences(step) for step in range(3))
        if sorted(rows) not in (sorted(first + second), sorted(first)):  # one where an update holds all rows
            return "the first updates are not an epoch"
        if sorted(second) != sorted(again):
            return "the resumed update has other rows"
        *_, end = descent(copy.deepcopy(m), [first, second], learns_all)
        uninterrupted = transformers.Qwen3ForCausalLM.from_pretrained(f"{place}/end")
        return astray(uninterrupted, end, m) or astray(run.trainer.model, end, m)

    return Case(trainer, learns_all, None, check, train=train)


@setup("keep")
def stops_early() -> Case:
    """Evaluates after each update, stops when that is no longer much better, and takes the best weights."""
    rows, some = words(), words(8, 51)
    args = arguments(
        **{"max_steps": 6, "learning_rate": SHARP, "output_dir": folder(), "load_best_model_at_end": True},
        **{"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1},
        **{"metric_for_best_model": "eval_loss", "greater_is_better": False, "per_device_eval_batch_size": 8},
    )
    patience = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=10.0)
    trainer = plain(Trainer, "Llama", args, rows, eval_dataset=table(some), callbacks=[patience])

    def check(run: Run, m: PreTrainedModel) -> str:
        logged = [line["eval_loss"] for line in run.trainer.state.log_history if "eval_loss" in line]
        updates = [run.sequences(step) for step in range(len(run.steps) - 1)]
        if len(updates) != 3 or len(logged) != 3:
            return f"stops after {len(updates)} updates and {len(logged)} evaluations"
        points = [copy.deepcopy(one) for one in descent(copy.deepcopy(m), updates, learns_all)]
        losses = [learns_all(one, some).item() for one in points]
        if max(abs(a - b) for a, b in zip(logged, losses, strict=True)) > TOLERANCE:
            return f"evaluates to {logged}, of {losses}"
        return astray(run.trainer.model, points[losses.index(min(losses))], m)

    return Case(trainer, learns_all, rows, check)


class Budget(TrainerCallback):
    """Stops when enough tokens were seen."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.num_input_tokens_seen >= 100


class WrittenOut(Trainer):
    """A training step as older scripts write it out."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@setup("keep")
def budget_of_tokens() -> Case:
    """`training_step` written out, and a callback that stops after a hundred tokens, padding not counted."""
    rows = words()
    counting = {"include_num_input_tokens_seen": "non_padding", "average_tokens_across_devices": False}
    args = arguments(2, 2, max_steps=9, **counting)
    trainer = plain(WrittenOut, "Phi3", args, rows, callbacks=[Budget()])

    def check(run: Run, _: PreTrainedModel) -> str:
        sizes = [sum(map(len, run.sequences(step))) for step in range(len(run.steps) - 1)]
        if run.trainer.state.num_input_tokens_seen != sum(sizes):
            return f"counts {run.trainer.state.num_input_tokens_seen} tokens, of {sum(sizes)}"
        return "" if sum(sizes[:-1]) < 100 <= sum(sizes) else f"stops after updates of {sizes} tokens"

    return Case(trainer, learns_all, None, check)


@setup("keep")
def made_when_trained() -> Case:
    """`model_init`, by which the trainer makes its model anew when it trains."""
    rows = words()
    more = {"model_init": lambda: model("Mistral", sliding_window=6)}
    trainer = Trainer(None, arguments(), lm_collator(), table(rows), **more)
    return Case(trainer, lambda m, _: learns_all(m, rows))


@setup("keep")
def two_stages() -> Case:
    """The same trainer trains on a second dataset when it is done with the first."""
    first, second = words(), words(12, 61, low=12, high=25)
    trainer = plain(Trainer, "Granite", arguments(learning_rate=SHARP), first)

    def train(one: Trainer) -> None:
        one.train()
        one.train_dataset = table(second)
        one.train()

    def check(run: Run, m: PreTrainedModel) -> str:
        if sorted(run.sequences(1)) != sorted(second):
            return "the second stage has other rows"
        *_, end = descent(copy.deepcopy(m), [first, second], learns_all)
        return astray(run.trainer.model, end, m)

    return Case(trainer, lambda m, _: learns_all(m, first), first, check, train=train, tokens_per_micro=64)


class Sampler(TrainerCallback):
    """Goes on with two prompts after each update."""

    def __init__(self, prompts: list[Ids]) -> None:
        self.prompts, self.replies = prompts, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.eval()
        ids = padded(self.prompts, PAD, left=True)
        made = model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=6, do_sample=False)
        self.replies.append(made[:, ids.shape[1] :].tolist())


@setup("keep")
def samples_while_it_trains() -> Case:
    """A callback that generates from prompts padded on the left; then the model is saved and read again."""
    rows, prompts = words(), words(2, 71, low=3, high=9)
    made = model("Gemma3Text", sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    made.generation_config.eos_token_id = None
    sampler, place = Sampler([row[:-1] for row in prompts]), folder()
    trainer = plain(Trainer, made, arguments(2, 3, max_steps=2, learning_rate=SHARP), rows, callbacks=[sampler])

    def check(run: Run, m: PreTrainedModel) -> str:
        updates = [run.sequences(step) for step in range(len(run.steps) - 1)]
        for one, replies in zip(descent(copy.deepcopy(m), updates, learns_all), sampler.replies, strict=True):
            for prompt, reply in zip(prompts, replies, strict=True):
                ids = prompt[:-1]
                for _ in range(6):
                    ids = [*ids, int(logits_of(one, ids)[-1].argmax())]
                if ids[-6:] != reply:
                    return f"goes on with {reply}, of {ids[-6:]}"
            end = one
        run.trainer.save_model(place)
        return astray(transformers.Gemma3ForCausalLM.from_pretrained(place), end, m)

    return Case(trainer, learns_all, None, check)


# Metrics


class Perplexity:
    """Adds up losses batch by batch, and says the perplexity at the end."""

    def __init__(self) -> None:
        self.total, self.num = 0.0, 0

    def __call__(self, prediction, compute_result: bool) -> Measures:
        self.total += float(prediction.predictions.sum())
        self.num += int((prediction.label_ids[:, 1:] != IGNORED).sum())
        if not compute_result:
            return {}
        found = {"perplexity": float(torch.tensor(self.total / self.num).exp()), "tokens": float(self.num)}
        self.total, self.num = 0.0, 0
        return found


@setup("keep")
def metrics_batch_by_batch() -> Case:
    """`batch_eval_metrics` over two sets, of losses that `preprocess_logits_for_metrics` makes of the logits."""
    rows, sets = words(), {"near": words(7, 81), "far": words(8, 82, low=9, high=30)}
    trainer = plain(
        Trainer,
        model("StableLm", initializer_range=0.05),
        arguments(per_device_eval_batch_size=3, batch_eval_metrics=True),
        rows,
        eval_dataset={name: table(some) for name, some in sets.items()},
        compute_metrics=Perplexity(),
        preprocess_logits_for_metrics=next_losses,
    )

    def measured(m: PreTrainedModel) -> Measures:
        found = {}
        for name, some in sets.items():
            found[f"eval_{name}_perplexity"] = float(learns_all(m, some).exp())
            found[f"eval_{name}_tokens"] = float(sum(len(row) - 1 for row in some))
        return found

    return case_of(trainer, whole(rows), measure=lambda one: one.evaluate(), measured=measured)


@setup("keep")
def evaluates_one_by_one() -> Case:
    """Batches of one row to evaluate: the loss is the mean over rows of their means, of two sets."""
    rows, some, test = words(), words(8, 91), words(6, 92, low=2, high=30)
    args = arguments(per_device_eval_batch_size=1)
    trainer = plain(Trainer, "Llama", args, rows, eval_dataset=table(some))

    def measure(one: Trainer) -> Measures:
        return {**one.evaluate(), **one.evaluate(table(test), metric_key_prefix="test")}

    def measured(m: PreTrainedModel) -> Measures:
        means = [[losses_of(m, (row, row)).mean() for row in them] for them in (some, test)]
        return {"eval_loss": float(sum(means[0]) / len(some)), "test_loss": float(sum(means[1]) / len(test))}

    return case_of(trainer, whole(rows), measure=measure, measured=measured)


@setup("keep")
def logs_of_sft() -> Case:
    """What SFTTrainer logs of an update: loss, entropy, accuracy and tokens."""
    rows, made = words(), model("Qwen3")
    examples = []
    for row in rows:
        guesses = [BOS, *logits_of(made, row).argmax(-1).tolist()]
        examples.append((row, [guesses[at] if at % 2 else token for at, token in enumerate(row)]))
    data = table(rows, labels=[labels for _, labels in examples])
    args = sft_arguments(12, 1, logging_strategy="steps", logging_steps=1)
    trainer = SFTTrainer(made, args, None, data, processing_class=tokenizer())

    def check(run: Run, m: PreTrainedModel) -> str:
        pairs = [predictions(m, example) for example in examples]
        logits, targets = torch.cat([one for one, _ in pairs]).detach(), torch.cat([one for _, one in pairs])
        truth = {
            "loss": F.cross_entropy(logits, targets),
            "entropy": -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
            "mean_token_accuracy": (logits.argmax(-1) == targets).double().mean(),
            "num_tokens": torch.tensor(float(sum(map(len, rows)))),
        }
        logged = run.trainer.state.log_history[0]
        wrong = {name for name, value in truth.items() if not abs(logged.get(name, 1e9) - float(value)) < 1e-3}
        assert 0.3 < truth["mean_token_accuracy"] < 0.8
        return "; ".join(f"logs {name} {logged.get(name)}, of {truth[name]:.4f}" for name in sorted(wrong))

    return case_of(trainer, examples, check=check)


# Losses


class Noted(Trainer):
    """Notes the loss of each batch."""

    noted: list[float]

    def terms(self, model, inputs, num_items_in_batch):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return outputs.loss, outputs

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = self.terms(model, inputs, num_items_in_batch)
        self.noted.append(float(loss.detach()))
        return (loss, outputs) if return_outputs else loss


class Deep(Noted):
    """Learns the next token from the first layer too."""

    def terms(self, model, inputs, num_items_in_batch):
        outputs = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
        early = model.lm_head(model.model.norm(outputs.hidden_states[1]))
        return outputs.loss + 0.3 * next_losses(early, inputs["labels"]).sum() / num_items_in_batch, outputs


@setup("keep")
def deep_supervision() -> Case:
    """A trainer subclassed twice: the second class adds a loss of the first layer, the first notes what it is."""
    rows = words()
    trainer = plain(Deep, "Olmo2", arguments(), rows)
    trainer.noted = []

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row in rows:
            hidden = m.model(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[1]
            early = m.lm_head(m.model.norm(hidden))[0, :-1]
            parts.append(
                losses_of(m, (row, row)) + 0.3 * F.cross_entropy(early, torch.tensor(row[1:]), reduction="none")
            )
        return torch.cat(parts).mean()

    def check(run: Run, m: PreTrainedModel) -> str:
        found, true = sum(run.trainer.noted), loss(m, []).item()
        return "" if abs(found - true) < 1e-3 else f"notes losses of {found:.4f}, of {true:.4f}"

    return Case(trainer, loss, rows, check)


class PromptWeight(Trainer):
    """Weighs what stands before `SEP` a tenth."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        weights = torch.where((inputs["input_ids"] == SEP).cumsum(1) > 0, 1.0, 0.1)
        losses = next_losses(outputs.logits, inputs["labels"])
        loss = (losses * weights[:, 1:]).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def weighs_prompts() -> Case:
    """A weight of prompts by a cumulative sum over the columns of `input_ids`."""
    rows = with_prompts(words())

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        weights = [torch.tensor([1.0 if at >= row.index(SEP) else 0.1 for at in range(1, len(row))]) for row in rows]
        losses = [losses_of(m, (row, row)) for row in rows]
        return (torch.cat(losses) * torch.cat(weights).double()).sum() / sum(map(len, losses))

    return Case(plain(PromptWeight, "Llama", arguments(), rows), loss, rows)


class TwoAhead(SFTTrainer):
    """Learns the token after the next as well, from the same logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        logits, labels = outputs.logits[:, :-2], inputs["labels"][:, 2:]
        later = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss = outputs.loss + 0.5 * later / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("keep")
def learns_two_ahead() -> Case:
    """A second term with labels shifted by two: what stands two behind the end of a row is no target of it."""
    rows = words(low=2)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        total, num = torch.zeros((), dtype=torch.float64), sum(len(row) - 1 for row in rows)
        for row in rows:
            logits, ids = logits_of(m, row), torch.tensor(row)
            total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            total = total + 0.5 * F.cross_entropy(logits[:-2], ids[2:], reduction="sum")
        return total / num

    return Case(sft(rows, model("Qwen2"), TwoAhead), loss, rows)


# What depends on the batch, or on rows that a flat batch does not have


def in_batches(seen: list[Ids], size: int) -> list[list[Ids]]:
    """Rows that were one batch each."""
    return [seen[at : at + size] for at in range(0, len(seen), size)]


@setup("refuse")
def balances_experts() -> Case:
    """A balancing loss over the experts of each batch of two: not a sum over tokens."""
    rows = words()
    made = model("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    trainer = sft(rows, made, router_aux_loss_coef=0.5)

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        m.set_experts_implementation("eager")
        balances = []
        for pair in in_batches(seen, 2):
            gates = [m(input_ids=torch.tensor([row]), output_router_logits=True).router_logits for row in pair]
            chances = torch.cat([layer.reshape(-1, 4) for one in gates for layer in one]).softmax(-1)
            used = F.one_hot(chances.topk(2, -1).indices, 4).sum(1).double()
            balances.append(4 * (used.mean(0) * chances.mean(0)).sum())
        return learns_all(m, rows) + 0.5 * torch.stack(balances).mean()

    return Case(trainer, loss, rows)


class Adversarial(Trainer):
    """Learns each batch again with the embedding moved along what its gradient has become."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = model.get_input_embeddings().weight
        change = 2.0 * weight.grad / weight.grad.norm()
        weight.data.add_(change)
        super().training_step(model, inputs, num_items_in_batch)
        weight.data.sub_(change)
        return loss


@setup("refuse")
def adversarial_steps() -> Case:
    """A `training_step` with two backward passes, the second at a point that the accumulated gradient decides."""
    rows = words()

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        num = sum(len(row) - 1 for row in rows)
        weight, total = m.get_input_embeddings().weight, {}
        for twice in in_batches(seen, 4):
            pair, change = twice[:2], torch.zeros_like(weight)
            for _ in range(2):
                with torch.no_grad():
                    weight += change
                grads = true_gradient(m, learns_all(m, pair) * sum(len(row) - 1 for row in pair) / num)
                with torch.no_grad():
                    weight -= change
                total = {name: value + total.get(name, 0.0) for name, value in grads.items()}
                grad = total["model.embed_tokens.weight"]
                change = 2.0 * grad / grad.norm()
        m.zero_grad()
        return towards(m, total)

    return Case(plain(Adversarial, "Llama", arguments(), rows), loss)


class Rewarded(Trainer):
    """Learns rows by their reward, as far as it is above those of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        reward = inputs.pop("reward")
        outputs = model(**inputs)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        num = (inputs["labels"][:, 1:] != IGNORED).sum(1)
        means = next_losses(outputs.logits, inputs["labels"]).sum(1) / num
        loss = (advantage * means).mean() / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def rewards_beside_the_batch() -> Case:
    """Rewards made standard over the four rows of a batch."""
    rows = words()
    rewards = [float(index * index % 7) for index in range(len(rows))]

    def collate(features: list[dict]) -> dict:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        return {**batch, "reward": torch.tensor([row["reward"] for row in features])}

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        parts = []
        for some in in_batches(seen, 4):
            reward = torch.tensor([rewards[rows.index(row)] for row in some]).double()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            parts.append((advantage * torch.stack([losses_of(m, (row, row)).mean() for row in some])).mean())
        return torch.stack(parts).mean()

    args = arguments(4, 3, remove_unused_columns=False)
    return Case(Rewarded(model(), args, collate, table(rows, reward=rewards)), loss, rows)


class Hardest(Trainer):
    """Learns the harder half of the tokens of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        losses = next_losses(outputs.logits, inputs["labels"])[inputs["labels"][:, 1:] != IGNORED]
        loss = losses.topk(len(losses) // 2).values.mean() / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def hardest_tokens() -> Case:
    """The harder half of the tokens of each batch of four."""
    rows = words()

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        parts = []
        for some in in_batches(seen, 4):
            losses = torch.cat([losses_of(m, (row, row)) for row in some])
            parts.append(losses.topk(len(losses) // 2).values.mean())
        return torch.stack(parts).mean()

    return Case(plain(Hardest, "Llama", arguments(4, 3), rows), loss, rows)


class BatchNormForCausalLM(transformers.LlamaForCausalLM):
    """Norms what the head reads by mean and variance of the batch."""

    def __init__(self, config):
        super().__init__(config)
        self.batch_norm = nn.BatchNorm1d(config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(self.batch_norm(hidden.flatten(0, 1)).view_as(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@setup("refuse", padded_is_true=False)  # padding is among what the layer takes mean and variance of
def norms_over_the_batch() -> Case:
    """A BatchNorm before the head: mean and variance of the tokens of each batch of four."""
    rows = words()
    config = model().config
    torch.manual_seed(0)
    made = BatchNormForCausalLM(config)

    def loss(m: PreTrainedModel, seen: list[Ids]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for some in in_batches(seen, 4):
            hidden = [m.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in some]
            every = torch.cat(hidden)
            for row, one in zip(some, hidden, strict=True):
                normed = (one - every.mean(0)) / (every.var(0, unbiased=False) + m.batch_norm.eps).sqrt()
                logits = m.lm_head(normed * m.batch_norm.weight + m.batch_norm.bias)
                total = total + F.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
        return total / sum(len(row) - 1 for row in rows)

    return Case(plain(Trainer, made, arguments(4, 3), rows), loss, rows)


@setup("refuse")
def prompts_read_both_ways() -> Case:
    """A mask of four dimensions, by which the tokens of a prompt see each other."""
    rows = with_prompts(words())

    def mask_of(row: Ids, width: int) -> torch.Tensor:
        sees = torch.ones(width, width).tril().bool()
        prompt = row.index(SEP) + 1
        sees[:prompt, :prompt] = True
        return torch.where(sees, 0.0, -1e9)[None]

    def collate(features: list[dict]) -> dict:
        some = [row["input_ids"] for row in features]
        batch = batch_of([(row, after(row, SEP)) for row in some])
        masks = [mask_of(row, batch["input_ids"].shape[1]) for row in some]
        return {**batch, "attention_mask": torch.stack(masks)}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row in rows:
            mask = mask_of(row, len(row))[None].double()
            parts.append(losses_of(m, (row, after(row, SEP)), attention_mask=mask))
        return torch.cat(parts).mean()

    return Case(Trainer(model(), arguments(), collate, table(rows)), loss, rows)


class MultiTask(Trainer):
    """Batches of one task each, whose loss is weighed by the task of the batch."""

    weights = (1.0, 0.2)

    def get_train_dataloader(self) -> DataLoader:
        tasks = self.train_dataset["task"]
        places = [[at for at, one in enumerate(tasks) if one == task] for task in (0, 1)]
        batches = [some[at : at + 2] for some in places for at in range(0, len(some), 2)]
        loader = DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        task = int(inputs.pop("task")[0])
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * self.weights[task]
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def batches_of_one_task() -> Case:
    """A loader whose batches have one task each, and a loss that looks at the task of the first row."""
    rows = words()
    tasks = [index % 2 for index in range(len(rows))]

    def collate(features: list[dict]) -> dict:
        batch = batch_of(whole([row["input_ids"] for row in features]))
        return {**batch, "task": torch.tensor([row["task"] for row in features])}

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = [MultiTask.weights[task] * losses_of(m, (row, row)) for row, task in zip(rows, tasks, strict=True)]
        return torch.cat(parts).mean()

    trainer = MultiTask(model("Qwen2"), arguments(remove_unused_columns=False), collate, table(rows, task=tasks))
    return Case(trainer, loss, rows)


class Preferences(Trainer):
    """The first half of the rows of a batch is preferred to the second."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        better, worse = (-next_losses(outputs.logits, inputs["labels"]).sum(1)).chunk(2)
        loss = -F.logsigmoid(0.1 * (better - worse)).mean() / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def preferred_rows() -> Case:
    """Two rows per example, of which the loss compares the likelihoods."""
    better, worse = words(), words(12, 95)

    def collate(features: list[dict]) -> dict:
        return batch_of(whole([row[name] for name in ("chosen", "rejected") for row in features]))

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        one, two = ([-losses_of(m, (row, row)).sum() for row in rows] for rows in (better, worse))
        return -F.logsigmoid(0.1 * (torch.stack(one) - torch.stack(two))).mean()

    data = Dataset.from_dict({"chosen": better, "rejected": worse})
    trainer = Preferences(model(), arguments(remove_unused_columns=False), collate, data)
    return Case(trainer, loss, [*better, *worse])


class Sinks(Trainer):
    """Punishes attention to the first token."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_attentions=True, num_items_in_batch=num_items_in_batch)
        first = torch.stack([one[..., 0].mean(1) for one in outputs.attentions]).sum(0)
        real = inputs["labels"][:, 1:] != IGNORED
        loss = outputs.loss + 0.5 * first[:, 1:][real].sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@setup("refuse")
def punishes_attention() -> Case:
    """A second term of the attention of each row to its first token, (batch, heads, seq, seq)."""
    rows = words()
    trainer = plain(Sinks, model("Llama", attn_implementation="eager"), arguments(), rows)

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row in rows:
            attentions = m(input_ids=torch.tensor([row]), output_attentions=True).attentions
            first = torch.stack([one[0, :, 1:, 0].mean(0) for one in attentions]).sum(0)
            parts.append(losses_of(m, (row, row)) + 0.5 * first)
        return torch.cat(parts).mean()

    return Case(trainer, loss, rows)


@setup("refuse")
def reads_and_writes() -> Case:
    """T5: an encoder, a decoder that looks at its own row of it, and labels that are not shifted."""
    rows, answers = words(), [row[1:] for row in words(12, 97)]
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    ends = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    torch.manual_seed(0)
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **sizes, **ends))
    trainer = Seq2SeqTrainer(
        made,
        Seq2SeqTrainingArguments(**QUIET, per_device_train_batch_size=12),
        DataCollatorForSeq2Seq(tokenizer(), made),
        table(rows, labels=answers, attention_mask=[[1] * len(row) for row in rows]),
    )

    def loss(m: PreTrainedModel, _: list[Ids]) -> torch.Tensor:
        parts = []
        for row, answer in zip(rows, answers, strict=True):
            wanted = torch.tensor([answer])
            logits = m(input_ids=torch.tensor([row]), labels=wanted).logits[0]
            parts.append(F.cross_entropy(logits, wanted[0], reduction="none"))
        return torch.cat(parts).mean()

    return Case(trainer, loss)


if __name__ == "__main__":
    main()
