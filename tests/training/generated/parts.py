"""What generated programs are made of: data, batches of many forms, small models, and a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from syncprims.training import CheckpointError, save_state

DIM, MOST = 3, 128  # of an input, and items at most
STEEP = 22_000.0  # a gradient: three of them are too much for half precision
_NUMBERS = torch.arange(MOST * DIM, dtype=torch.float64).reshape(MOST, DIM)
#: Inputs and targets of all items: of any numbers, and of whole ones.
DATA = {False: ((1.7 * _NUMBERS).sin(), (0.9 * _NUMBERS).cos()),
        True: (_NUMBERS % 5 - 2, _NUMBERS % 3 - 1)}  # fmt: skip
LENGTHS = [1 + n % 3 for n in range(MOST)]  # of items


class Stream(IterableDataset[int]):
    """A stream of numbered items, which workers share."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.count, step))


# -- batches of many forms -------------------------------------------------------------------------


class Thing(NamedTuple):
    """An object of the program's own."""

    number: Any
    note: Any


class Opaque:
    """One that is no container."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Sheet:
    """A batch that is a dataclass, with things that are not of an item."""

    ids: Tensor
    names: list[str]
    roles: tuple[str, ...] = ("query", "answer")


class Form(NamedTuple):
    """How a batch is made, which items it holds, and what a program gathers of it."""

    collate: Callable[[list[int]], Any]
    ids: Callable[[Any], list[int]]
    results: Callable[[Any], Any]  #: with an entry per item, except of whole forms
    objects: bool = False
    whole: bool = False  #: a result is one row, whatever that holds


def _shared(ids: list[int]) -> dict[str, Any]:
    return {"ids": torch.tensor(ids), "weight": torch.arange(10.0), "eye": torch.eye(DIM),
            "roles": ["query", "answer"], "scale": torch.tensor(2.0)}  # fmt: skip


def _ids_beside_shared(batch: dict[str, Any]) -> list[int]:
    for name, value in _shared([]).items():
        same = value.equal if torch.is_tensor(value) else value.__eq__
        assert name == "ids" or same(batch[name]), f"{name} is {batch[name]}"
    return batch["ids"].tolist()  # type: ignore[no-any-return]


def _packed(ids: list[int]) -> dict[str, Tensor]:
    bounds = torch.tensor([0, *(LENGTHS[n] for n in ids)]).cumsum(0)
    return {"row": torch.tensor([[n for n in ids for _ in range(LENGTHS[n])]]), "bounds": bounds}


def _unpacked(batch: dict[str, Tensor]) -> list[int]:
    row, bounds = batch["row"], batch["bounds"].tolist()
    assert row.shape == (1, bounds[-1]), f"{tuple(row.shape)} with bounds {bounds}"
    return row[0, bounds[:-1]].tolist()


def _ragged(ids: list[int]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.full((LENGTHS[n],), n) for n in ids], True, -1)


def _sparse(ids: list[int]) -> Tensor:
    places = torch.tensor([[*range(len(ids))], ids])
    return torch.sparse_coo_tensor(places, torch.ones(len(ids)), (len(ids), MOST))


def _detection(ids: list[int]) -> Any:
    pairs = [(torch.full((3, 2, 2 + n % 2), n), {"id": torch.tensor(n)}) for n in ids]
    return tuple(zip(*pairs, strict=True))


def _ids_of_rows(rows: Tensor) -> list[int]:
    return rows.to_dense().argmax(1).tolist()


FORMS: dict[str, Form] = {
    "rows": Form(torch.tensor, Tensor.tolist, lambda b: b),
    "texts": Form(lambda ids: [f"item {n}" for n in ids],
                  lambda b: [int(text.split()[1]) for text in b], lambda b: b),
    "objects": Form(lambda ids: [*map(Opaque, ids)], lambda b: [x.number for x in b], lambda b: b),
    "dataclass": Form(lambda ids: Sheet(torch.tensor(ids), [*map(str, ids)]),
                      lambda b: [*map(int, b.names)], lambda b: b.ids),
    "named tuples": Form(lambda ids: Thing(torch.tensor(ids), {"x": torch.tensor(ids)}),
                         lambda b: b.note["x"].tolist(), lambda b: b.number),
    "detection": Form(_detection, lambda b: [int(image[0, 0, 0]) for image in b[0]],
                      lambda b: [*b[1]], objects=True),
    "packed": Form(_packed, _unpacked, lambda b: [_unpacked(b)], objects=True, whole=True),
    "ragged": Form(_ragged, lambda b: b[:, 0].tolist(), lambda b: b[:, 0]),
    "time first": Form(lambda ids: torch.tensor([ids] * 5), lambda b: b[0].tolist(),
                       lambda b: b.amax(0)),
    "sparse": Form(_sparse, _ids_of_rows, lambda b: b),
    "shared": Form(_shared, _ids_beside_shared, lambda b: b["ids"]),
}  # fmt: skip


def ids_of(results: Any) -> list[int]:
    """Return the items of gathered results, whatever form they have."""
    if isinstance(results, Tensor) and results.is_sparse:
        return _ids_of_rows(results)
    if isinstance(results, Tensor):
        return [int(n) for n in results.reshape(-1)]
    if isinstance(results, list | tuple):
        return [n for part in results for n in ids_of(part)]
    if isinstance(results, dict):
        return ids_of(results["id"])
    return [int(str(getattr(results, "number", results)).split()[-1])]


# -- models ----------------------------------------------------------------------------------------


class Part(nn.Module):
    """A part of a chain: it adds something to what it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "sparse":
            self.table = nn.Embedding(MOST, DIM, sparse=True)
            return
        if kind == "steep":
            self.far = nn.Parameter(torch.zeros(1))
        self.linear, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM) if kind == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.3 if kind == "dropout" else 0.0)
        for number, p in enumerate(self.parameters() if kind == "whole" else ()):
            p.data.copy_((torch.arange(p.numel()).view(p.shape) + number) % 3 - 1)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        if self.kind == "sparse":
            return x + self.table(ids)
        inner = self.norm(self.linear(x))
        return x + self.last(self.drop(inner if self.kind == "whole" else inner.tanh()))


def errors(
    ids: Sequence[int], chain: Sequence[nn.Module], whole: bool = False, half: Any = None
) -> Tensor:
    """Return the error of each item, of a chain of parts, each of which computes in `half`."""
    numbers = torch.tensor(ids, dtype=torch.int64)
    dtype = next((p.dtype for p in parameters(*chain)), torch.float64)
    x, targets = (values[numbers].to(dtype) for values in DATA[whole])
    for part in chain:
        with torch.autocast("cpu", half) if half else contextlib.nullcontext():
            x = part(x, numbers)
        x = x.float() if half else x
    found = (x - targets.to(x.dtype)).square().sum(1)
    for part in chain:
        if isinstance(part, Part) and part.kind == "steep":
            found = found + STEEP * part.far
    return found


def parameters(*parts: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of these parts, each once."""
    return list(dict.fromkeys(p for part in parts for p in part.parameters()))


def named(**parts: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of these parts, each once, with their names."""
    found = {p: f"{n}.{name}" for n, part in parts.items() for name, p in part.named_parameters()}
    return [(name, p) for p, name in found.items()]


def shard(part: nn.Module, mesh: Any) -> None:
    """Shard a part in torch's usual form: each layer, and the root, which has one of its own."""
    from torch.distributed.fsdp import fully_shard

    layers = [layer for layer in part.children() if parameters(layer)]
    for layer in [*layers[1:], part]:
        fully_shard(layer, mesh=mesh)


# -- what programs call ----------------------------------------------------------------------------


def by_hand(items: int, batch: int, rank: int, ranks: int) -> list[Tensor]:
    """Return this rank's batches of a loader that nobody prepares; all ranks have as many."""
    batches = torch.arange(items).split(batch)  # type: ignore[no-untyped-call]
    return [*batches[rank : len(batches) // ranks * ranks : ranks]]


def evaluate(*parts: nn.Module) -> None:
    """Evaluate the chain of these parts."""
    nn.ModuleList(parts).eval()
    with torch.no_grad():
        errors([0], parts)
    nn.ModuleList(parts).train()


def spoil(*parts: nn.Module) -> None:
    """Change the values of these parts."""
    with torch.no_grad():
        for p in parameters(*parts):
            p.add_(1.0)


def save_broken(folder: str, is_broken: bool) -> None:
    """Save what one rank cannot save."""
    thing: Any = torch.optim.SGD([torch.ones(1)])
    if is_broken:
        thing.register_state_dict_pre_hook(lambda _: 1 / 0)
    with contextlib.suppress(CheckpointError):
        save_state(folder, {}, rank_objects={"thing": thing})


class Log:
    """What one rank has seen and done."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = [[], [], []]  #: items, by epoch and micro-batch
        self.gathered: list[list[list[int]]] = [[], [], []]  #: items that were gathered, likewise
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.saved: tuple[int, int, int] | None = None  #: epoch, its micro-batches, and number

    def see(self, epoch: int, form: str, batch: Any) -> list[int]:
        """Note a batch; return its items."""
        self.seen[epoch].append(FORMS[form].ids(batch))
        return self.seen[epoch][-1]

    def norm(self, norm: Any) -> None:
        """Note a norm."""
        self.norms.append(float(whole_tensor(norm)))

    def end(self, parts: Sequence[nn.Module], optimizers: Sequence[Any]) -> dict[str, Any]:
        """Return all that was noted, with the final values of the parts."""
        self.rates = [o.param_groups[0]["lr"] for o in optimizers]
        values = [[whole_tensor(t) for t in (*p.parameters(), *p.buffers())] for p in parts]
        flat = [
            [x for t in own for x in t.detach().double().reshape(-1).tolist()] for own in values
        ]
        return vars(self) | {"values": flat}


def whole_tensor(tensor: Any) -> Tensor:
    """Return a tensor that may be sharded."""
    return getattr(tensor, "full_tensor", lambda: tensor)()  # type: ignore[no-any-return]
