"""Generated programs as text that Python runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from .parts import FORMS
from .programs import NEVER, OPTIMIZERS, Block, Program

#: What `prepare`, or Accelerate's configuration, is told of the loader.
_WAYS = {
    "dispatch": "dispatch_batches=True, ",
    "split": "split_batches=True, ",
    "split stream": "split_batches=True, ",
    "split dispatch": "split_batches=True, dispatch_batches=True, ",
    "uneven": "even_batches=False, ",
}
_UNUSED, _SCALER = "find_unused_parameters=True", "init_scale=64.0"
_MAIN = """
if __name__ == "__main__":
    import tempfile
    from syncprims.testing import run_world
    with tempfile.TemporaryDirectory() as folder:
        for resumed, ranks in {}:
            print(*run_world(lambda: program(folder, resumed), ranks, {}), sep="\\n")
"""


def replay(p: Program, fault: str) -> str:
    """Return a failing program as a script to paste, and what is wrong with it."""
    options = f"kind={'threads' if p.world == 'threads' else 'processes'!r}, torch={needs_torch(p)}"
    phases = [(False, p.ranks), *[(True, p.resume[1])] * (p.resume[0] >= 0)]
    script = textwrap.indent(program(p) + _MAIN.format(phases, options), "    ")
    return f"seed {p.seed}: {fault}\nIn tests/training, this shows it:\n{script}"


def needs_torch(p: Program) -> bool:
    """Return whether a world of a test has to serve torch, or random states of each rank."""
    return p.wraps != {"plain"} or "dropout" in p.kinds


def program(p: Program, *, of_accelerate: bool = False) -> str:
    """Return the function of a program; for Accelerate itself in place of our names for it."""
    ours = "accelerate import Accelerator, utils" if p.face else "training import *"
    lines = [f"from syncprims.{ours}", "from generated.parts import *"]
    lines += ["import contextlib, syncprims as sp", "def program(folder, resumed=False):"]
    lines += _indented(line for line in _body(p) if line.strip())
    if of_accelerate:
        lines = [line for line in lines if "log.gathered" not in line]
        lines[0] = lines[0].replace("syncprims.", "")
    made = "\n".join(lines)
    return made.replace("use_stateful_dataloader=True, data_seed=5", "") if of_accelerate else made


def _indented(lines: Iterable[str], by: int = 1) -> Iterator[str]:
    return (by * "    " + line for line in lines)


def _names(letters: str, numbers: Iterable[int]) -> list[str]:
    return [f"{letter}{i}" for i in numbers for letter in letters]


def models(p: Program) -> Iterator[str]:
    """Yield the lines that make the models: the same in the reference."""
    yield f"torch.manual_seed({p.seed % 1000})"
    for i, model in enumerate(p.models):
        yield f"m{i} = Part({model.kind!r}).to(torch.{p.dtype})"
        if p.wide:
            yield f"for p in m{i}.parameters(): p.grad_dtype = torch.float32"
    yield "m1.linear.weight = m0.linear.weight" if p.tied else ""
    yield f"loose = nn.Parameter(torch.ones(1, dtype=torch.{p.dtype}))" if p.loose else ""


def optimizers(p: Program, order: str = "") -> Iterator[str]:
    """Yield the lines that make the optimizers and their schedules."""
    for i, owned in enumerate(p.owners):
        named = f"named({', '.join(f'm{n}=m{n}' for n in owned)}){order}"
        named += ' + [("loose", loose)]' * (p.loose and i == 0)
        yield f"o{i} = torch.optim.{OPTIMIZERS[p.optimizer].format(named)}"
        yield f"s{i} = torch.optim.lr_scheduler.StepLR(o{i}, 2, 0.5)" if p.schedule else ""


def _body(p: Program) -> Iterator[str]:
    parts = _names("m", range(len(p.models)))
    stepping = _names("os" if p.schedule else "o", range(len(p.owners)))
    yield "rank, ranks, log = sp.get_rank(), sp.get_world_size(), Log()"
    yield from models(p)
    if p.wraps != {"plain"}:
        yield "sp.current().open_process_group()"
    for m, model in zip(parts, p.models, strict=True):
        if model.wrap == "fsdp":
            yield f'shard({m}, torch.distributed.init_device_mesh("cpu", (ranks,)))'
        if model.wrap == "hand":
            yield f"{m} = nn.parallel.DistributedDataParallel({m}, {_UNUSED})"
    yield from _job(p, parts, stepping)
    yield f"torch.manual_seed({p.seed % 1000} + rank)" if "dropout" in p.kinds else ""
    resumes, first = p.resume[0] >= 0, "0"
    if resumes:
        first = 'loader.state_dict()["epoch"]'
        load = "load_state(folder, state, rng=False, any_world_size=True)"
        yield f"state = dict({', '.join(f'{n}={n}' for n in (*parts, *stepping, 'loader'))})"
        yield f"if resumed: {'job.load_state(folder)' if p.face else load}"
    yield from ("number = -1", f"for epoch in range({first}, {p.epochs}):")
    depth = 1 + (p.way == "uneven")
    if p.way == "uneven":
        yield f"    with {'job.join_uneven_inputs([])' if p.face else 'join_uneven_inputs(job)'}:"
    yield from _indented(["for step, batch in enumerate(loader):"], depth)
    yield from _indented(_micro_batch(p, ", ".join(parts)), depth + 1)
    if p.flush:
        steps = [line for i in p.blocks[0].optimizers for line in _step(p, i)]
        yield from _indented(["job.flush()", *steps])
    own = ", ".join(name for name in stepping if name[0] == "o")
    yield f"return log.end([{', '.join(parts)}], [{own}])"


def _job(p: Program, parts: list[str], stepping: list[str]) -> Iterator[str]:
    way, prepare = _WAYS.get(p.way, ""), "{0} = job.prepare({0})"
    if p.face:
        handlers = [f"utils.GradScalerKwargs({_SCALER})"] * (p.mode == "fp16")
        handlers += [f"utils.DistributedDataParallelKwargs({_UNUSED})"] * ("ddp" in p.wraps)
        config = f"utils.DataLoaderConfiguration({way}use_stateful_dataloader=True, data_seed=5)"
        yield f"job = Accelerator(cpu=True, gradient_accumulation_steps={p.steps},"
        yield f'    mixed_precision="{p.mode}", dataloader_config={config},'
        yield f"    kwargs_handlers=[{', '.join(handlers)}])"
    else:
        scaler = f", scaler=dict({_SCALER})" * (p.mode == "fp16")
        precision = f', precision=Precision("{p.mode}"{scaler})' * (p.mode != "no")
        yield f"job = Accumulator({p.steps}{precision})"
        prepare = f"{{0}} = prepare({{0}}, accumulator=job, {way}seed=5)"
    if not p.late:
        yield from optimizers(p)
    if p.reordered:
        yield from ("if resumed:", *_indented(optimizers(p, "[::-1]")))
    if p.way == "by hand":
        yield f"loader = by_hand({p.items}, {p.batch}, rank, ranks)"
    else:
        data = f"{'Stream' if p.way.endswith('stream') else 'range'}({p.items}), {p.batch}"
        more = ", shuffle=True" * p.shuffle + ", drop_last=True" * p.drop_last
        more += f', num_workers={p.workers}, collate_fn=FORMS["{p.form}"].collate'
        yield f"loader = torch.utils.data.DataLoader({data}{more})"
    for m, model in zip(parts, p.models, strict=True):
        if model.wrap == "ddp" and not p.face:
            yield f"{m} = prepare({m}, accumulator=job, ddp=dict({_UNUSED}))"
    early = parts + stepping * (not p.late) + ["loader"] * (p.way != "by hand")
    yield prepare.format(", ".join(early))
    if p.late:
        yield from (*optimizers(p), prepare.format(", ".join(stepping)))
    for i, owned in enumerate(p.owners if p.inside else ()):
        yield f"def inside(p, o=o{i}): o.step(), o.zero_grad()"
        for m in _names("m", owned):
            yield f"list({m}.parameters())[0].register_post_accumulate_grad_hook(inside)"


def _micro_batch(p: Program, parts: str) -> Iterator[str]:
    (at, event), form, objects = p.event, p.form, ", True" * FORMS[p.form].objects
    yield from ("number += 1", f'ids = log.see(epoch, "{form}", batch)')
    if p.gather:
        gathered = f'job.gather_for_metrics(FORMS["{form}"].results(batch){objects})'
        yield f"log.gathered[epoch].append(ids_of({gathered}))"
    for i, model in enumerate(p.models):
        if model.frozen:
            yield f"m{i}.linear.requires_grad_(not ({model.frozen}))"
    body = [line for block in p.blocks for line in _block(p, block)]
    if event == "failed pass":
        clear = [f"o{i}.zero_grad()" for i in range(len(p.owners))]
        body = ["try:", *_indented(body), "except ZeroDivisionError:", *_indented(clear)]
    yield from body
    save = "job.save_state(folder)" if p.face else "save_state(folder, state)"
    state = [*parts.split(", "), *_names("o", range(len(p.owners)))]
    if event == "evaluate":
        yield f"if number == {at} and rank == 0: evaluate({parts})"
    if event == "break":
        yield f"if number == {at}: break"
    if event in ("save", "load", "broken save"):
        yield f"if number == {at} and job.sync_gradients:"
        yield f"    state = dict({', '.join(f'{name}={name}' for name in state)})"
        yield "    save_broken(folder, rank == ranks - 1)" if event == "broken save" else ""
        yield f"    {save}"
        if event == "load":
            yield from (f"    spoil({parts})", "    load_state(folder, state)")
    if p.resume[0] >= 0:
        yield "may_save = job.sync_gradients and not (resumed or log.saved)"
        yield f"if may_save and number + 1 >= {p.resume[0]}:"
        yield from (f"    {save}", "    log.saved = epoch, step + 1, number")
        yield f"if log.saved and number >= log.saved[2] + {p.lost}:"
        yield f"    return log.end([{parts}], [])"


def _block(p: Program, block: Block) -> Iterator[str]:
    depth = (block.every > 1) + (block.named is not None)
    if block.every > 1:
        yield f"if number % {block.every} == 0:"
    if block.named is not None:
        named = ", ".join(_names("m", block.named))
        yield from _indented([f"with job.accumulate({named}):"], depth - 1)
    lines = [f"o{i}.zero_grad()" for i in block.optimizers] if p.zero_first else []
    for one in block.passes:
        chain = [f"m{i}" if i != one.some else f"*[m{i}] * (rank % 2)" for i in one.chain]
        loss = f"errors(ids, [{', '.join(chain)}], whole={'whole' in p.kinds})"
        lines += [f"m{i}.requires_grad_(False)" for i in one.held]
        lines += [f"loss = ({loss}{' * loose' * p.loose}).{'sum' if p.weighted else 'mean'}()"]
        for where, factor in ((p.skip, "nan"), (p.overflow, "inf")):
            if where != NEVER:
                lines += [f'if (number, rank) == {where}: loss = loss * float("{factor}")']
        if p.event[1] == "failed pass":
            lines += [f"if number == {p.event[0]}: raise ZeroDivisionError"]
        weight = ", weight=len(ids)" * p.weighted + ", skip=loss.isnan()" * (p.skip != NEVER)
        lines += ["loss.backward()" if p.plain else f"job.backward(loss{weight})"]
        lines += [f"m{i}.requires_grad_(True)" for i in one.held]
    lines += [line for i in block.optimizers for line in _step(p, i)]
    yield from _indented(lines, depth)


def _step(p: Program, i: int) -> Iterator[str]:
    if p.inside:
        return
    owned = f"parameters({', '.join(_names('m', p.owners[i]))})"
    guard = "if job.sync_gradients: " * p.face  # Accelerate clips between windows, too
    if p.clip == "norm":
        yield f"{guard}norm = job.clip_grad_norm_({owned}, 0.5)"
        yield "if job.sync_gradients: log.norm(norm)"
    if p.clip == "value":
        yield f"{guard}job.clip_grad_value_({owned}, 0.25)"
    yield f"o{i}.step()"
    yield f"s{i}.step()" if p.schedule else ""
    yield "" if p.zero_first else f"o{i}.zero_grad()"
