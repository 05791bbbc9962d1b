"""In the manner of the LoRA trainers of diffusers: frozen weights, few trained ones, main saves."""

from __future__ import annotations

import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__, log_level="WARNING")


class Lora(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


def main(output_dir, resume_from_checkpoint=None):
    accumulation, num_train_epochs, checkpointing_steps = 2, 2, 3
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        mixed_precision="bf16",
        project_config=ProjectConfiguration(project_dir=output_dir, logging_dir="logs"),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    if torch.backends.mps.is_available():
        accelerator.native_amp = False
    logger.info(accelerator.state, main_process_only=False)
    set_seed(11)
    if accelerator.is_main_process:
        os.makedirs(output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    weight_dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    vae = nn.Linear(6, 4).requires_grad_(False).to(accelerator.device, dtype=weight_dtype)
    unet = nn.Sequential(Lora(nn.Linear(4, 8)), nn.Tanh(), Lora(nn.Linear(8, 4)))
    lora_layers = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(lora_layers, lr=1e-2)
    data = torch.randn(22, 6, generator=torch.Generator().manual_seed(5))
    with accelerator.main_process_first():
        train = TensorDataset(data)
    train_dataloader = DataLoader(train, shuffle=True, batch_size=2, num_workers=0)
    len_after_sharding = math.ceil(len(train_dataloader) / accelerator.num_processes)
    steps_per_epoch = math.ceil(len_after_sharding / accumulation)
    total_for_scheduler = num_train_epochs * accelerator.num_processes * steps_per_epoch
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: max(0.0, 1.0 - n / total_for_scheduler)
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image-fine-tune", config={"rank": 2})
    losses, rates, global_step, first_epoch = [], [], 0, 0
    if resume_from_checkpoint:
        path = os.path.basename(resume_from_checkpoint)
        accelerator.load_state(os.path.join(output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch = global_step // steps_per_epoch
    for _ in range(first_epoch, num_train_epochs):
        unet.train()
        train_loss = 0.0
        for _, (pixels,) in enumerate(train_dataloader):
            with accelerator.accumulate(unet):
                latents = vae(pixels.to(dtype=weight_dtype))
                noise = torch.randn_like(latents)
                target = noise
                prediction = unet((latents + noise).float())
                loss = nn.functional.mse_loss(prediction.float(), target.float())
                avg_loss = accelerator.gather(loss.repeat(2)).mean()
                train_loss += avg_loss.item() / accumulation
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(lora_layers, 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                losses.append(train_loss)
                rates.append(lr_scheduler.get_last_lr()[0])
                train_loss = 0.0
                if global_step % checkpointing_steps == 0 and accelerator.is_main_process:
                    save_path = os.path.join(output_dir, f"checkpoint-{global_step}")
                    accelerator.save_state(save_path)
    for tracker in accelerator.trackers:
        assert tracker.name in ("tensorboard", "wandb")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = {
            n: p for n, p in accelerator.unwrap_model(unet).named_parameters() if p.requires_grad
        }
        torch.save(state, os.path.join(output_dir, "pytorch_lora_weights.bin"))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    total = sum(float(p.detach().double().abs().sum()) for p in lora_layers)
    accelerator.free_memory()
    return {"losses": losses, "rates": rates, "right": [], "weights": total}
