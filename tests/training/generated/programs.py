"""Training programs drawn from a seed, and what makes one simpler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from support.torch_programs import FSDP2_TRAINS_ON_CPUS

from .parts import FORMS

Ints = tuple[int, ...]
NEVER = (-1, 0)  # a micro-batch, and a rank
SHARDED = "fsdp" if FSDP2_TRAINS_ON_CPUS else "hand"

# Without what softens the first step, rounding decides about its direction.
OPTIMIZERS = {
    "sgd": "SGD({}, lr=2**-9)",
    "momentum": "SGD({}, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "adamw": "AdamW({}, lr=0.02, eps=0.01, foreach=False)",
    "foreach": "AdamW({}, lr=0.02, eps=0.01, foreach=True)",
    "fused": "AdamW({}, lr=0.02, eps=0.01, fused=True)",
    "adagrad": "Adagrad({}, lr=0.05, initial_accumulator_value=0.1)",
    "sparse": "SparseAdam({}, lr=0.02, eps=0.01)",
}


class Model(NamedTuple):
    """A model of the chain."""

    kind: str = "tanh"
    wrap: str = "plain"  #: or "ddp" by `prepare`, "hand" for a DDP of the program's, "fsdp"
    frozen: str = ""  #: when its first layer is


class Pass(NamedTuple):
    """A forward and a backward pass."""

    chain: Ints  #: the models that it passes
    held: Ints = ()  #: those that learn nothing from it
    some: int = -1  #: the model that only ranks of odd numbers use


class Block(NamedTuple):
    """The passes of a micro-batch in one ``accumulate``, and the steps after them."""

    named: Ints | None  #: the models; () is all, and None no block
    passes: tuple[Pass, ...]
    optimizers: Ints
    every: int = 1  #: micro-batches from one to the next


def _one_of(*choices: Any) -> Any:
    """Return a field of one of these; the first one is the simplest."""
    return field(default=choices[0], metadata={"choices": choices})


def _maybe(one_in: int) -> Any:
    return _one_of(*[False] * (one_in - 1), True)


@dataclass(frozen=True)
class Program:
    """A training program. The defaults are the simplest one."""

    seed: int = 0
    models: tuple[Model, ...] = (Model(),)
    blocks: tuple[Block, ...] = (Block((), (Pass((0,)),), (0,)),)
    owners: tuple[Ints, ...] = ((0,),)  #: of each optimizer, its models
    items: int = 8
    skip: tuple[int, int] = NEVER  #: a micro-batch, and the rank whose loss is NaN there
    overflow: tuple[int, int] = NEVER
    event: tuple[int, str] = (-1, "")  #: what happens after a micro-batch
    resume: tuple[int, int] = (-1, 1)  #: micro-batches before a save and a stop; ranks afterwards
    ranks: int = _one_of(1, 2, 2, 2, 3, 4, 5)
    world: str = _one_of(*["threads"] * 28, "processes", "gloo")
    face: bool = _maybe(2)  #: with Accelerate's names
    steps: int = _one_of(1, 1, 2, 2, 3, 4)
    weighted: bool = _maybe(3)
    dtype: str = _one_of(*["float64"] * 8, "float32", "bfloat16", "float16")
    mode: str = _one_of(*["no"] * 8, "bf16", "fp16")
    wide: bool = _maybe(2)  #: gradients of half precision are in single precision
    tied: bool = _maybe(10)
    optimizer: str = _one_of(*OPTIMIZERS)
    late: bool = _maybe(5)  #: optimizers are made after `prepare`
    inside: bool = _maybe(30)  #: they step while the gradients are computed
    clip: str = _one_of("", "", "norm", "value")
    schedule: bool = _maybe(3)
    zero_first: bool = _maybe(3)
    plain: bool = _maybe(10)  #: ``loss.backward()``
    batch: int = _one_of(1, 2, 2, 3, 4)
    epochs: int = _one_of(1, 1, 2)
    form: str = _one_of(*["rows"] * 7, *FORMS)
    way: str = _one_of("map", "map", "map", "stream", "dispatch", "split", "split stream",
                       "split dispatch", "uneven", "by hand")  # fmt: skip
    workers: int = _one_of(*[0] * 15, 1, 2)
    shuffle: bool = _maybe(3)
    drop_last: bool = _maybe(5)
    flush: bool = _one_of(False, True, True)
    lost: int = _one_of(0, 0, 1)  #: micro-batches between the save and the stop
    reordered: bool = _maybe(3)  #: the optimizer has its parameters in another order afterwards
    gather: bool = _one_of(False, True, True)
    loose: bool = _maybe(15)  #: the first optimizer has a parameter that belongs to no model

    @property
    def wraps(self) -> set[str]:
        return {model.wrap for model in self.models}

    @property
    def kinds(self) -> set[str]:
        return {model.kind for model in self.models}

    @property
    def is_exact(self) -> bool:
        """Whether all of its sums have few bits, so that no order of them rounds."""
        rounds, rest = divmod(self.items, self.batch * self.ranks)
        few = all(n in (1, 2, 4, 8) for n in (self.ranks, self.steps, self.batch, rounds))
        return self.kinds == {"whole"} and few and not (rest or self.weighted or self.models[1:])

    @property
    def has_twin(self) -> bool:
        """Whether Accelerate itself runs it, and means the same."""
        usual = self.face and self.way == "map" and self.mode == "no"
        one = len(self.blocks) == 1 and self.blocks[0].passes[0].some < 0
        odd = self.weighted or self.event[1] or self.shuffle or self.loose or self.tied or self.wide
        odd = odd or self.skip != NEVER or (self.zero_first and self.steps > 1)
        return usual and one and not odd and {*self.models} == {Model()}


# -- drawing ---------------------------------------------------------------------------------------

#: What is fixed in a program of a seed: else what is possible with few others would be rare.
_Theme = dict[str, Any]
_THEMES: list[_Theme] = [
    *[_Theme()] * 6,
    *[_Theme(kinds=[kind], wraps=["plain"]) for kind in ("sparse", "norm", "dropout")],
    _Theme(count=2, named=(1,)), _Theme(count=3, named=(0, 1)), _Theme(count=2, named=(0,)),
    _Theme(wraps=[SHARDED], later=""), _Theme(wraps=["ddp", "hand", SHARDED], later=""),
    _Theme(wraps=["ddp", "hand"], later=""), _Theme(count=2, shape="adversaries"),
    _Theme(frozen="step % 2 == 1", wraps=["plain"]), _Theme(kinds=["whole"], count=1),
    _Theme(dtype="bfloat16", mode="no"), _Theme(dtype="float16", mode="no", optimizer="sgd"),
    _Theme(mode="fp16", overflow=True), _Theme(mode="bf16"), _Theme(skip=True, wraps=["plain"]),
    _Theme(later="event"), _Theme(later="resume"), _Theme(way="by hand"), _Theme(way="uneven"),
    _Theme(gather=True, face=True), _Theme(inside=True), _Theme(world="processes", workers=1),
    _Theme(world="gloo", face=True, way="map", kinds=["tanh"], wraps=["plain"], weighted=False,
           shuffle=False, mode="no", frozen="", later=""),
]  # fmt: skip


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    theme = rng.choice(_THEMES)
    while not is_possible(program := _draw(seed, rng, theme)):
        pass
    return program


def _draw(seed: int, rng: random.Random, theme: dict[str, Any]) -> Program:
    def one_of(*choices: Any, name: str = "") -> Any:
        return theme.get(name, rng.choice(choices))

    choices = {f.name: f.metadata.get("choices") for f in fields(Program)}
    p = Program(seed, **{name: one_of(*of, name=name) for name, of in choices.items() if of})
    odd = ["whole"], ["sparse"], ["tanh", "sparse"], ["norm"], ["dropout"]
    kinds = one_of(*[["tanh"]] * 5, *odd, name="kinds") if p.dtype != "float16" else ["steep"]
    all_wraps = ["ddp", "hand", SHARDED]
    wraps = one_of(*[["plain"]] * 6, *([wrap] for wrap in all_wraps), all_wraps, name="wraps")
    closing = f"step % {p.steps} == {p.steps - 1}"
    times = [*[""] * 25, "True", "epoch > 0", "epoch == 0", "step % 2 == 1", closing]
    every = tuple(range(one_of(1, 2, 3, name="count")))
    models = tuple(
        Model(one_of(*kinds), one_of(*wraps), one_of(*times, name="frozen" * (i == 0)))
        for i in every
    )
    some = one_of(-1, -1, *every) if len(every) > 1 else -1
    sample = tuple(sorted(rng.sample(every, rng.randint(1, len(every)))))
    named = one_of((), sample, sample, None, name="named")
    owners: tuple[Ints, ...] = one_of((every,), tuple((i,) for i in every))
    passes = one_of(*[(Pass(every, some=some),)] * 3, (Pass(every), Pass(named or every)))
    blocks = (Block(named, passes, tuple(range(len(owners)))),)
    if len(every) > 1 and one_of("", "", "", "adversaries", name="shape"):  # in one block or two
        first, second, owners = Pass(every, held=every[1:]), Pass(every[1:]), ((0,), every[1:])
        apart = Block((0,), (first,), (0,), one_of(1, 1, 2)), Block(every[1:], (second,), (1,))
        blocks = one_of(apart, (Block(one_of((), (0,)), (first, second), (0, 1)),))
    items = one_of(1, p.ranks * p.batch * rng.randint(1, 6), rng.randint(1, 30))
    at = rng.randrange(1 + items // (p.ranks * p.batch))
    event = at, one_of("evaluate", "save", "load", "broken save", "break", "failed pass")
    resume, where = (at + 1, one_of(1, p.ranks, p.ranks, 2, 3)), (at, rng.randrange(p.ranks))
    later = one_of("", "", "", "event", "resume", name="later")
    return replace(
        p, models=models, blocks=blocks, owners=owners, items=items,
        optimizer=p.optimizer if kinds != ["whole"] else "sgd",
        dtype=p.dtype if p.mode == "no" else "float32",
        skip=where if one_of(*[False] * 9, True, name="skip") else NEVER,
        overflow=where if p.mode == "fp16" and one_of(False, True, name="overflow") else NEVER,
        event=event if later == "event" else (-1, ""),
        resume=resume if later == "resume" else (-1, 1),
        lost=p.lost * (later == "resume"), reordered=p.reordered and later == "resume",
        gather=p.gather and p.face, flush=p.flush and p.way == "by hand",
        wide=p.wide and p.dtype in ("bfloat16", "float16"),
    )  # fmt: skip


def is_possible(p: Program) -> bool:
    """Return whether there is such a program, and one right result of it."""
    kinds, models, way, event = p.kinds, p.models, p.way, p.event[1]
    wrapped, half = p.wraps != {"plain"}, p.dtype in ("bfloat16", "float16")
    first, apart, resumed = p.blocks[0], len(p.blocks) > 1, p.resume[0] >= 0
    passes = [one for block in p.blocks for one in block.passes]
    outside, uneven, own = first.named is None, way == "uneven", kinds & {"norm", "dropout"}
    simple = not apart and len(passes) == 1 and not passes[0].held
    usual = simple and not (resumed or event or p.plain or p.inside or outside)
    frozen, whole = any(m.frozen for m in models), "whole" in kinds
    rules = [
        # DDP and FSDP want the same passes on all ranks, and parameters that learn in all of them.
        not wrapped or (p.ranks > 1 and simple and passes[0].some < 0 and not p.tied),
        not wrapped or not (resumed or event or p.late or uneven or p.skip != NEVER or p.inside),
        not wrapped or p.dtype == "float64" or p.mode == "fp16",
        all(not m.frozen and m.kind in ("tanh", "whole") for m in models if m.wrap != "plain"),
        all(len({models[i].wrap == "fsdp" for i in owned}) == 1 for owned in p.owners),
        not (p.face and wrapped and "plain" in p.wraps),  # the face wraps all of them
        # Sparse gradients have few optimizers, and no norm.
        "sparse" not in kinds or p.optimizer in ("sgd", "adagrad", "sparse"),
        "sparse" not in kinds or not (p.tied or p.clip or half or p.mode != "no"),
        (p.optimizer == "sparse") <= (kinds == {"sparse"}),
        all(not m.frozen for m in models if m.kind == "sparse"),
        not p.tied or (len(models) > 1 and len(p.owners) == 1),
        not whole or (p.optimizer == "sgd" and p.dtype == "float64" and len(models) < 3),
        p.dtype != "bfloat16" or p.optimizer != "fused",
        p.dtype != "float16" or p.optimizer == "sgd",  # others divide by small ones
        (kinds == {"steep"}) == (p.dtype == "float16") and not ("steep" in kinds and p.tied),
        "steep" not in kinds or not p.weighted or (p.batch < 3 and not uneven),
        not p.wide or (half and hasattr(torch.Tensor, "grad_dtype") and p.optimizer == "sgd"),
        p.mode == "no" or (p.dtype == "float32" and not p.plain),
        p.overflow == NEVER or not (way == "by hand" or uneven or apart or outside),
        p.skip == NEVER or (usual and not uneven),
        not p.plain or (p.steps == 1 and not p.weighted and p.mode == "no" and not uneven),
        not outside or not (uneven or resumed or (p.face and p.steps > 1)),
        # Steps inside of a backward pass: they are right on one rank, and refused on several.
        not p.inside or (simple and p.steps == 1 and not (p.weighted or p.clip or p.schedule)),
        not p.inside or not (p.zero_first or resumed or event or p.plain or p.flush or p.tied),
        not p.inside or (p.mode == "no" and p.skip == NEVER and not frozen),
        not p.inside or p.dtype != "float16",  # its pass needs the weights of before
        way != "by hand" or (p.form == "rows" and p.items >= p.batch * p.ranks and not resumed),
        way != "by hand" or not (p.gather or p.workers or p.shuffle or p.drop_last),
        # A rank that has ended freezes nothing, and gathers nothing.
        not uneven or not (frozen or p.gather or any(one.held for one in passes)),
        not p.flush or not (apart or outside or p.plain or way != "by hand"),
        not way.startswith("split") or not any(p.batch % n for n in (p.ranks, p.resume[1])),
        not (way.endswith("stream") and p.shuffle) and p.gather <= p.face,
        not p.workers or (p.world == "processes" and not wrapped),
        p.world != "gloo" or (p.ranks > 1 and event not in ("save", "load", "broken save")),
        p.world != "gloo" or not (resumed or own),
        not p.loose or (p.ranks == 1 and not (p.clip or half or "sparse" in kinds or resumed)),
        # Each rank has its own running means and random numbers, which one process has to follow.
        not own or (usual and way == "map" and p.skip == NEVER and p.world == "threads"),
        not own or p.ranks > 1,
        "norm" not in kinds or (p.batch > 1 and p.items % (p.batch * p.ranks) == 0),
        event != "failed pass" or (p.steps == 1 and not (apart or p.flush) and p.mode == "no"),
        not (event == "load" and p.face),  # it would move the loader, too
        not event or (not resumed and (not uneven or event == "evaluate")),
        resumed or not (p.reordered or p.lost),
        not resumed or not (apart or uneven),
        all(not models[i].frozen for one in passes for i in one.held),
    ]
    return all(rules)


# -- simpler ones ----------------------------------------------------------------------------------


def simpler(p: Program) -> Iterator[Program]:
    """Yield programs that are simpler in one respect."""
    least = {"ranks": 2, "items": 1, "epochs": 1, "steps": 2, "batch": 1}
    for name, here in vars(p).items():
        low = least.get(name, getattr(Program, name))
        if name in least:
            numbers = {n for n in (low, (here + low) // 2, here - 1) if low <= n < here}
            yield from (_with(p, name, n) for n in numbers)
        elif name not in ("seed", "models", "blocks", "owners") and here != low:
            yield _with(p, name, low)
    for i, model in enumerate(p.models):
        for simple in {Model(), model._replace(frozen=""), model._replace(wrap="plain")} - {model}:
            yield replace(p, models=(*p.models[:i], simple, *p.models[i + 1 :]))
    every, first = tuple(range(len(p.models))), p.blocks[0]
    if len(p.blocks) > 1 or len(first.passes) > 1:
        one = first._replace(passes=(Pass(every),), optimizers=tuple(range(len(p.owners))))
        yield replace(p, blocks=(one,))
    if fewer := every[:-1]:
        one = Block(first.named and (0,), (Pass(fewer),), (0,))
        yield replace(p, models=p.models[:-1], owners=(fewer,), blocks=(one,))


def _with(p: Program, name: str, value: Any) -> Program:
    return replace(p, **{name: value})
