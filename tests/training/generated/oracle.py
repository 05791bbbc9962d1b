"""The numbers of a generated program, from one process of plain torch, on the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from . import parts, text
from .programs import Block, Pass, Program


class Round(NamedTuple):
    """The batches of one micro-batch, by rank; None for a rank that has none."""

    number: int
    epoch: int
    step: int
    batches: list[list[int] | None]
    last: bool  #: of its epoch


def rounds(p: Program, phases: Sequence[list[dict[str, Any]]]) -> list[Round]:
    """Return the micro-batches of a run, as its ranks have seen them.

    A phase has a log for each rank. What came after the save of the first phase was lost.
    """
    found: list[Round] = []
    for logs in phases:
        number, saved = -1, logs[0]["saved"] if len(phases) > 1 and logs is phases[0] else None
        for epoch in range(p.epochs):
            mine = [log["seen"][epoch] for log in logs]
            for step in range(max(map(len, mine))):
                number += 1
                if saved is None or number <= saved[2]:
                    batches = [each[step] if step < len(each) else None for each in mine]
                    found.append(Round(number, epoch, step, batches, False))
    ends = [a.epoch != b.epoch for a, b in pairwise(found)] + [True] * bool(found)
    count, at_once = p.items // p.batch, 1 if p.way.startswith("split") else p.ranks
    if not p.drop_last:
        count = -(-p.items // p.batch)
    length = count // at_once if p.drop_last else -(-count // at_once)

    def is_last(one: Round, end: bool) -> bool:
        broken = p.event == (one.number, "break") and one.step + 1 < length
        return end and (p.way == "by hand" or not broken)

    return [r._replace(last=is_last(r, end)) for r, end in zip(found, ends, strict=True)]


@dataclass
class _Window:
    count: int = 0
    items: int = 0
    closed: bool = True


class Reference:
    """Runs a program. With another `order` of ranks, or `times` a factor, it rounds elsewhere."""

    def __init__(self, p: Program, order: int = 1, times: float = 1.0) -> None:
        self.p, self._order = p, order
        self._times = times / 64 if p.dtype == "float16" else times  # sums do not overflow
        self._half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(p.mode)
        self._log = parts.Log()
        self._windows = [_Window() for _ in p.blocks]

    def run(self, found: Sequence[Round]) -> dict[str, Any]:
        """Return what a rank would note."""
        p, space = self.p, {**vars(parts)}
        with torch.random.fork_rng(devices=[]):
            exec("\n".join([*text.models(p), *text.optimizers(p)]), space)
            self._models = [space[f"m{i}"] for i in range(len(p.models))]
            self._optimizers = [space[f"o{i}"] for i in range(len(p.owners))]
            self._schedules = [space[f"s{i}"] for i in range(len(p.owners) * p.schedule)]
            self._loose = [space["loose"]] if p.loose else []
            self._scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=p.mode == "fp16")
            # What each rank has of its own: running means, and random numbers.
            self._tensors = [b for m in self._models for b in m.buffers()]
            ranks = range(max((len(one.batches) for one in found), default=1))
            seeds = [torch.Generator().manual_seed(p.seed % 1000 + rank) for rank in ranks]
            self._own = [([b.clone() for b in self._tensors], s.get_state()) for s in seeds]
            for one in found:
                self._round(one)
        self._set(0)
        return self._log.end(self._models, self._optimizers)

    def _set(self, rank: int) -> None:
        for tensor, value in zip(self._tensors, self._own[rank][0], strict=True):
            tensor.copy_(value)
        torch.set_rng_state(self._own[rank][1])

    def _round(self, one: Round) -> None:
        p = self.p
        for model, spec in zip(self._models, p.models, strict=True):
            if spec.frozen:
                model.linear.requires_grad_(not eval(spec.frozen, one._asdict()))
        for block, window in zip(p.blocks, self._windows, strict=True):
            if p.event != (one.number, "failed pass") and one.number % block.every == 0:
                closing = self._micro_batch(one, block, window)
                self._step(block, window, len(one.batches), closing=closing)
        if p.flush and one.last:
            window = self._windows[0]
            closing = not window.closed and window.count > 0
            self._step(p.blocks[0], window, len(one.batches), closing=closing)

    def _micro_batch(self, one: Round, block: Block, window: _Window) -> bool:
        """Add the gradients of a micro-batch; return whether a step follows."""
        p, ranks = self.p, len(one.batches)
        if window.closed:
            window.count, window.items, window.closed = 0, 0, False
        at_end = one.last and p.way != "by hand"
        number, nan = p.skip
        if one.number == number and nan < ranks and one.batches[nan] is not None:
            window.closed = at_end
            return at_end and window.count > 0
        window.count += 1
        window.items += sum(map(len, filter(None, one.batches)))
        for each in block.passes:
            for i in each.held:
                self._models[i].requires_grad_(False)
            for rank in range(ranks)[:: self._order]:
                self._backward(one, each, rank)
            for i in each.held:
                self._models[i].requires_grad_(True)
        return window.count >= p.steps or at_end or block.named is None

    def _backward(self, one: Round, each: Pass, rank: int) -> None:
        p, ids = self.p, one.batches[rank]
        if ids is None:
            return
        self._set(rank)
        chain = [self._models[i] for i in each.chain if i != each.some or rank % 2]
        loss = parts.errors(ids, chain, "whole" in p.kinds, self._half)
        loss = loss * self._loose[0] if p.loose else loss
        loss = loss.sum() if p.weighted else loss.mean() / len(one.batches)
        loss = loss * float("inf") if (one.number, rank) == p.overflow else loss
        self._scaler.scale(loss * self._times).backward()
        self._own[rank] = [b.clone() for b in self._tensors], torch.get_rng_state()

    def _step(self, block: Block, window: _Window, ranks: int, *, closing: bool) -> None:
        p, skipped = self.p, set[int]()
        window.closed |= closing
        count = p.steps if p.face or block.named is None else window.count
        factor = 1 / max(window.items, 1) if p.weighted else 1 / max(count, 1)
        for i in block.optimizers:
            owned = parts.parameters(*(self._models[n] for n in p.owners[i]))
            owned += self._loose if i == 0 else []
            there: list[Any] = [q for q in owned if q.grad is not None] if closing else []
            for q in there:
                q.grad = q.grad * factor / self._times
            if there:
                self._scaler.unscale_(self._optimizers[i])
            if p.mode == "fp16" and not all(bool(q.grad.isfinite().all()) for q in there):
                skipped.add(i)
            if closing and p.clip == "norm":
                self._log.norms.append(float(clip_grad_norm_(owned, 0.5)))
            if there and p.clip == "value":
                clip_grad_value_(owned, 0.25)
            if there:
                self._scaler.step(self._optimizers[i])
                self._optimizers[i].zero_grad()
        if closing:
            with contextlib.suppress(AssertionError):  # no optimizer had a gradient
                self._scaler.update()
            advance = ranks if p.face and not p.way.startswith("split") else 1
            for i in set(block.optimizers) - skipped if p.schedule else ():
                for _ in range(advance):
                    self._schedules[i].step()
            means = self._own[0][0]
            self._own = [([b.clone() for b in means], state) for _, state in self._own]
