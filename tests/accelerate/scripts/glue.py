"""In the manner of `run_glue_no_trainer`: accumulation by hand, gathered predictions, resuming."""

from __future__ import annotations

import json
import logging
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

logger = get_logger(__name__)


def examples(count):
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        length = 4 + i % 5
        ids = torch.randint(2, 60, (length,), generator=generator)
        found.append({"input_ids": ids, "label": int(ids[0] % 2)})
    return found


def collate(items):
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.zeros(len(items), longest, dtype=torch.long)
    mask = torch.zeros(len(items), longest, dtype=torch.long)
    for row, item in enumerate(items):
        ids[row, : len(item["input_ids"])] = item["input_ids"]
        mask[row, : len(item["input_ids"])] = 1
    labels = torch.tensor([item["label"] for item in items])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main(output_dir, resume_from_checkpoint=None, report_to=None, max_train_steps=None):
    gradient_accumulation_steps, num_train_epochs, checkpointing_steps = 2, 2, 3
    tracking = {"log_with": report_to, "project_dir": output_dir} if report_to else {}
    accelerator = Accelerator(**tracking)
    logging.basicConfig(level=logging.WARNING)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(42)
    if accelerator.is_main_process:
        os.makedirs(output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    config = BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    with accelerator.main_process_first():
        train, held_out = examples(26), examples(11)
    train_dataloader = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=2)
    eval_dataloader = DataLoader(held_out, collate_fn=collate, batch_size=2)
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [
                    p for n, p in model.named_parameters() if not any(d in n for d in no_decay)
                ],
                "weight_decay": 0.1,
            },
            {
                "params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)],
                "weight_decay": 0.0,
            },
        ],
        lr=5e-3,
    )
    overrode_max_train_steps = max_train_steps is None
    steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    if max_train_steps is None:
        max_train_steps = num_train_epochs * steps_per_epoch
    lr_scheduler = get_scheduler(
        name="linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=max_train_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    steps_per_epoch = math.ceil(len(train_dataloader) / gradient_accumulation_steps)
    if overrode_max_train_steps:
        max_train_steps = num_train_epochs * steps_per_epoch
    num_train_epochs = math.ceil(max_train_steps / steps_per_epoch)
    if report_to:
        accelerator.init_trackers("glue_no_trainer", {"lr": 5e-3})
    progress_bar = tqdm(range(max_train_steps), disable=True)
    completed_steps, starting_epoch, resume_step = 0, 0, None
    if resume_from_checkpoint:
        accelerator.load_state(resume_from_checkpoint)
        difference = os.path.splitext(os.path.basename(resume_from_checkpoint))[0]
        resume_step = int(difference.replace("step_", "")) * gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // gradient_accumulation_steps
        resume_step -= starting_epoch * len(train_dataloader)
    progress_bar.update(completed_steps)
    losses, rates, accuracies = [], [], []
    for epoch in range(starting_epoch, num_train_epochs):
        model.train()
        if resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for step, batch in enumerate(active_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            losses.append(loss.item())
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                progress_bar.update(1)
                completed_steps += 1
                rates.append(lr_scheduler.get_last_lr()[0])
                if completed_steps % checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(output_dir, f"step_{completed_steps}"))
            if completed_steps >= max_train_steps:
                break
        model.eval()
        samples_seen, right = 0, 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather((predictions, batch["labels"]))
            if accelerator.num_processes > 1:
                if step == len(eval_dataloader) - 1:
                    predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                    references = references[: len(eval_dataloader.dataset) - samples_seen]
                else:
                    samples_seen += references.shape[0]
            right += int((predictions == references).sum())
        accuracies.append(right)
        if report_to:
            accelerator.log({"accuracy": right, "epoch": epoch}, step=completed_steps)
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        with open(os.path.join(output_dir, "all_results.json"), "w") as f:
            json.dump({f"eval_{i}": right for i, right in enumerate(accuracies)}, f)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    return {"losses": losses, "rates": rates, "right": accuracies, "weights": total}
