"""In the manner of `run_clm_no_trainer`: windows, a schedule for all ranks, gathered losses."""

from __future__ import annotations

import json
import math
import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

logger = get_logger(__name__)


def main(output_dir, resume_from_checkpoint=None):
    batch_size, num_train_epochs = 2, 2
    accelerator = Accelerator(gradient_accumulation_steps=3)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(7)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 40, (30, 8), generator=generator)
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    with accelerator.main_process_first():
        train, held_out = data[:22], data[22:29]
    train_dataloader = DataLoader(
        train, shuffle=True, collate_fn=default_data_collator, batch_size=batch_size
    )
    eval_dataloader = DataLoader(held_out, collate_fn=default_data_collator, batch_size=batch_size)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    max_train_steps = num_train_epochs * steps_per_epoch
    lr_scheduler = get_scheduler(
        name="cosine",
        optimizer=optimizer,
        num_warmup_steps=1 * accelerator.num_processes,
        num_training_steps=max_train_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    if accelerator.distributed_type == DistributedType.XLA:
        model.tie_weights()
    steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    max_train_steps = num_train_epochs * steps_per_epoch
    starting_epoch = 0
    if resume_from_checkpoint:
        accelerator.load_state(resume_from_checkpoint)
        starting_epoch = int(os.path.basename(resume_from_checkpoint).replace("epoch_", "")) + 1
    losses, rates, perplexities, completed_steps = [], [], [], 0
    for epoch in range(starting_epoch, num_train_epochs):
        model.train()
        for _, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                losses.append(loss.detach().float().item())
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                rates.append(lr_scheduler.get_last_lr()[0])
        model.eval()
        found = []
        for _, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            found.append(accelerator.gather_for_metrics(outputs.loss.repeat(batch_size)))
        perplexities.append(math.exp(torch.mean(torch.cat(found))))
        accelerator.save_state(os.path.join(output_dir, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        with open(os.path.join(output_dir, "all_results.json"), "w") as f:
            json.dump({"perplexity": perplexities[-1]}, f)
    accelerator.end_training()
    total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    return {"losses": losses, "rates": rates, "right": perplexities, "weights": total}
