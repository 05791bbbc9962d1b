"""A script in the manner of transformers' examples for Accelerate, ported by its import lines.

It trains a small BERT to classify sentences, with accumulation by hand, a schedule, metrics of all
ranks, checkpoints that it resumes from, and a model that transformers reads. Only the lines with
``syncprims.accelerate`` differ from the script for Accelerate.

    python examples/classify_text.py --output_dir /tmp/classified
    syncprims run -n 2 examples/classify_text.py --output_dir /tmp/classified
    torchrun --nproc-per-node 2 examples/classify_text.py --output_dir /tmp/classified
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from syncprims.accelerate import Accelerator
from syncprims.accelerate.logging import get_logger
from syncprims.accelerate.utils import set_seed

logger = get_logger(__name__)


def examples(count: int) -> list[dict[str, Any]]:
    """Return sentences of numbers; the first number decides their label."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        ids = torch.randint(2, 60, (4 + i % 5,), generator=generator)
        found.append({"input_ids": ids, "label": int(ids[0] % 2)})
    return found


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.zeros(len(items), longest, dtype=torch.long)
    mask = torch.zeros(len(items), longest, dtype=torch.long)
    for row, item in enumerate(items):
        ids[row, : len(item["input_ids"])] = item["input_ids"]
        mask[row, : len(item["input_ids"])] = 1
    labels = torch.tensor([item["label"] for item in items])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main(
    output_dir: str,
    resume_from_checkpoint: str | None = None,
    report_to: str | None = None,
    max_train_steps: int | None = None,
) -> dict[str, Any]:
    accumulation_steps, num_train_epochs, checkpointing_steps = 2, 2, 3
    if report_to:
        accelerator = Accelerator(log_with=report_to, project_dir=output_dir)
    else:
        accelerator = Accelerator()
    logging.basicConfig(level=logging.WARNING)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(42)
    if accelerator.is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model: Any = BertForSequenceClassification(config)
    with accelerator.main_process_first():
        train: Any = examples(26)
        held_out: Any = examples(11)
    train_dataloader: Any = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=2)
    eval_dataloader: Any = DataLoader(held_out, collate_fn=collate, batch_size=2)
    no_decay = ["bias", "LayerNorm.weight"]
    decayed: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, p in model.named_parameters():
        (others if any(part in name for part in no_decay) else decayed).append(p)
    optimizer: Any = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=5e-3
    )
    overrode_max_train_steps = max_train_steps is None
    steps_per_epoch = math.ceil(len(train_dataloader) / accumulation_steps)
    if max_train_steps is None:
        max_train_steps = num_train_epochs * steps_per_epoch
    lr_scheduler = get_scheduler(
        name="linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=max_train_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    # A prepared loader has this rank's batches only.
    steps_per_epoch = math.ceil(len(train_dataloader) / accumulation_steps)
    if overrode_max_train_steps:
        max_train_steps = num_train_epochs * steps_per_epoch
    num_train_epochs = math.ceil(max_train_steps / steps_per_epoch)
    if report_to:
        accelerator.init_trackers("classify_text", {"lr": 5e-3})

    progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    completed_steps, starting_epoch, resume_step = 0, 0, None
    if resume_from_checkpoint:
        accelerator.load_state(resume_from_checkpoint)
        completed_steps = int(Path(resume_from_checkpoint).name.replace("step_", ""))
        resume_step = completed_steps * accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
        progress_bar.update(completed_steps)
    losses, rates, correct = [], [], []
    for epoch in range(starting_epoch, num_train_epochs):
        model.train()
        active_dataloader = train_dataloader
        if resume_step is not None and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for step, batch in enumerate(active_dataloader):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss / accumulation_steps)
            if step % accumulation_steps == 0 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                progress_bar.update(1)
                completed_steps += 1
                rates.append(lr_scheduler.get_last_lr()[0])
                if completed_steps % checkpointing_steps == 0:
                    accelerator.save_state(f"{output_dir}/step_{completed_steps}")
            if completed_steps >= max_train_steps:
                break
        correct.append(evaluate(accelerator, model, eval_dataloader))
        if report_to:
            accelerator.log({"correct": correct[-1], "epoch": epoch}, step=completed_steps)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        found = {f"correct_{i}": right for i, right in enumerate(correct)}
        (Path(output_dir) / "all_results.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    norm = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    return {"losses": losses, "rates": rates, "right": correct, "weights": norm}


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> int:
    """Return how many held-out sentences are classified correctly, on all ranks."""
    model.eval()
    seen, right = 0, 0
    for step, batch in enumerate(loader):
        predictions = model(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather((predictions, batch["labels"]))
        if accelerator.num_processes > 1:
            if step == len(loader) - 1:  # the last batches hold some items twice
                predictions = predictions[: len(loader.dataset) - seen]
                references = references[: len(loader.dataset) - seen]
            else:
                seen += references.shape[0]
        right += int((predictions == references).sum())
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default=str(Path(__file__).parent / ".cache/classified"))
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--report_to")
    parser.add_argument("--max_train_steps", type=int)
    results = main(**vars(parser.parse_args()))
    logger.warning("%s of 11 are classified correctly", results["right"][-1])
