"""In the manner of `train_unconditional`: hooks, an EMA, saves by main alone, resuming by steps."""

from __future__ import annotations

import copy
import math
import os
import shutil
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__, log_level="WARNING")


def main(output_dir, resume_from_checkpoint=None, max_steps=None, limit=None):
    accumulation, num_epochs, checkpointing_steps = 2, 2, 2
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        mixed_precision="no",
        log_with="tensorboard" if accelerate_has_tensorboard() else None,
        project_config=ProjectConfiguration(
            project_dir=output_dir, logging_dir=os.path.join(output_dir, "logs")
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=7200))],
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4))
    ema_model = copy.deepcopy(model)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            torch.save(ema_model.state_dict(), os.path.join(output_dir, "unet_ema.pt"))
            for i, one in enumerate(models):
                assert isinstance(one, nn.Sequential), type(one)
                torch.save(one.state_dict(), os.path.join(output_dir, f"unet_{i}.pt"))
                weights.pop()

    def load_model_hook(models, input_dir):
        ema_model.load_state_dict(torch.load(os.path.join(input_dir, "unet_ema.pt")))
        for i in range(len(models)):
            one = models.pop()
            one.load_state_dict(torch.load(os.path.join(input_dir, f"unet_{i}.pt")))

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    logger.info(accelerator.state, main_process_only=False)
    if accelerator.is_main_process:
        os.makedirs(output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.95, 0.999))
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    train_dataloader = DataLoader(TensorDataset(data), batch_size=2, shuffle=True)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=len(train_dataloader) * num_epochs // accumulation
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    if accelerator.is_main_process:
        accelerator.init_trackers("train_unconditional")
    steps_per_epoch = math.ceil(len(train_dataloader) / accumulation)
    global_step, first_epoch, resume_step = 0, 0, 0
    if resume_from_checkpoint:
        path = sorted(
            (d for d in os.listdir(output_dir) if d.startswith("checkpoint")),
            key=lambda x: int(x.split("-")[1]),
        )[-1]
        accelerator.load_state(os.path.join(output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch = global_step // steps_per_epoch
        resume_step = (global_step * accumulation) % (steps_per_epoch * accumulation)
    losses, rates, ema_sum = [], [], 0.0
    for epoch in range(first_epoch, num_epochs):
        model.train()
        for step, (clean,) in enumerate(train_dataloader):
            if resume_from_checkpoint and epoch == first_epoch and step < resume_step:
                continue
            noise = torch.randn(clean.shape)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(clean + noise), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach().item())
            if accelerator.sync_gradients:
                with torch.no_grad():
                    pairs = zip(
                        ema_model.parameters(), accelerator.unwrap_model(model).parameters()
                    )
                    for mine, theirs in pairs:
                        mine.lerp_(theirs, 0.1)
                global_step += 1
                rates.append(lr_scheduler.get_last_lr()[0])
                if accelerator.is_main_process and global_step % checkpointing_steps == 0:
                    found = sorted(
                        (d for d in os.listdir(output_dir) if d.startswith("checkpoint")),
                        key=lambda x: int(x.split("-")[1]),
                    )
                    for old in found[: len(found) - 1]:
                        shutil.rmtree(os.path.join(output_dir, old))
                    save_path = os.path.join(output_dir, f"checkpoint-{global_step}")
                    accelerator.save_state(save_path)
                    logger.info(f"Saved state to {save_path}")
            accelerator.log({"loss": losses[-1], "lr": rates[-1] if rates else 0}, step=global_step)
            if limit is not None and global_step >= limit:
                break
        accelerator.wait_for_everyone()
        if limit is not None and global_step >= limit:
            break
    ema_sum = sum(float(p.detach().double().abs().sum()) for p in ema_model.parameters())
    accelerator.wait_for_everyone()
    accelerator.end_training()
    total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    return {"losses": losses, "rates": rates, "right": [ema_sum], "weights": total}


def accelerate_has_tensorboard():
    from accelerate.utils import is_tensorboard_available

    return is_tensorboard_available()
