"""Learn handwritten digits on several ranks, with numpy only.

This is plain data-parallel training: each rank computes the gradient of its share of every batch,
and all ranks update the same weights with the mean over the ranks.

    syncprims run -n 4 examples/digits.py
    python examples/digits.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from syncprims import (
    Trigger,
    all_reduce,
    assert_same,
    get_world_size,
    is_main,
    main_first,
    on_main,
    print_main,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[np.float64]]


def train(cache: Path, epochs: int) -> Arrays:
    with main_first(name="prepare digits"):  # rank 0 writes the cache, then the others read it
        data = prepare(cache)
    learn, held_out = cut(data, 0, 1440), cut(data, 1440, None)
    weights, momentum = fresh_weights(), None
    stop, best = Trigger("early stop"), Best(patience=5)

    for epoch in range(epochs):
        for batch in shuffled_batches(learn, epoch, size=120):
            slopes = all_reduce(gradients(weights, split(batch)), "mean")
            momentum = descend(weights, slopes, momentum)

        if is_main():  # one rank decides, all ranks stop at the same step
            loss, hits = evaluate(weights, held_out)
            if epoch % 5 == 0:
                print_main(f"epoch {epoch:2d}: held-out loss {loss:.3f}, {hits:.1%} right")
            if not best.improved_by(loss):
                stop.set(f"no better for {best.patience} epochs, {hits:.1%} right")
        if stop.check():
            print_main(f"stopped after epoch {epoch}: {stop.reason}")
            break

    assert_same(weights, "weights")  # raises if ranks differ, and names them
    print_main(f"{get_world_size()} ranks hold the same weights, bit for bit")
    return weights


# -- the data ----------------------------------------------------------------------------------


def prepare(cache: Path) -> Arrays:
    """Return the 1,797 digits of scikit-learn, 8 x 8 pixels each, from the cache if it exists."""
    if not cache.exists():
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(digits))
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, x=pixels[order] / 16.0, y=np.eye(10)[digits[order]])
        print(f"prepared {len(digits)} digits in {cache}")  # noqa: T201
    with np.load(cache) as stored:
        return {"x": stored["x"], "y": stored["y"]}


def cut(data: Arrays, begin: int, end: int | None) -> Arrays:
    return {name: array[begin:end] for name, array in data.items()}


def shuffled_batches(data: Arrays, epoch: int, size: int) -> Iterator[Arrays]:
    """Yield the batches of an epoch, in the same order on every rank: the seed is the epoch."""
    order = np.random.default_rng(epoch).permutation(len(data["x"]))
    for begin in range(0, len(order), size):
        chosen = order[begin : begin + size]
        yield {name: array[chosen] for name, array in data.items()}


# -- the model: 64 pixels, 48 hidden units, 10 digits ------------------------------------------


def fresh_weights() -> Arrays:
    rng = np.random.default_rng(42)
    return {
        "hidden": rng.normal(0, 0.2, (64, 48)),
        "hidden bias": np.zeros(48),
        "output": rng.normal(0, 0.2, (48, 10)),
        "output bias": np.zeros(10),
    }


def forward(w: Arrays, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    hidden = np.maximum(0, x @ w["hidden"] + w["hidden bias"])
    scores = hidden @ w["output"] + w["output bias"]
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def gradients(w: Arrays, batch: Arrays) -> Arrays:
    """Return the gradient of the mean cross-entropy for every weight."""
    hidden, guess = forward(w, batch["x"])
    error = (guess - batch["y"]) / len(guess)
    back = (error @ w["output"].T) * (hidden > 0)
    return {
        "hidden": batch["x"].T @ back,
        "hidden bias": back.sum(axis=0),
        "output": hidden.T @ error,
        "output bias": error.sum(axis=0),
    }


def descend(w: Arrays, slopes: Arrays, momentum: Arrays | None) -> Arrays:
    """Update the weights in place by the gradients; return the momentum for the next step."""
    before = momentum or {name: np.zeros_like(array) for name, array in w.items()}
    speed = {name: 0.9 * before[name] - 0.1 * slopes[name] for name in w}
    for name in w:
        w[name] += speed[name]
    return speed


def evaluate(w: Arrays, data: Arrays) -> tuple[float, float]:
    _, guess = forward(w, data["x"])
    right = guess.argmax(axis=1) == data["y"].argmax(axis=1)
    loss = -np.log((guess * data["y"]).sum(axis=1) + 1e-12).mean()
    return float(loss), float(right.mean())


class Best:
    """The best loss so far, and the number of epochs since then."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._loss = float("inf")
        self._since = 0

    def improved_by(self, loss: float) -> bool:
        """Record `loss`; return False when the best loss is older than the patience."""
        self._since += 1
        if loss < self._loss - 1e-3:
            self._loss, self._since = loss, 0
        return self._since < self.patience


@on_main
def save(weights: Arrays, path: Path) -> None:
    np.savez(path, allow_pickle=False, **weights)
    print(f"weights in {path}")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--cache", type=Path, default=here / ".cache" / "digits.npz")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--save", type=Path, help="where rank 0 writes the weights (.npz)")
    options = parser.parse_args()

    print_main(f"{get_world_size()} ranks learn handwritten digits")
    weights = train(options.cache, options.epochs)
    if options.save:
        save(weights, options.save)


if __name__ == "__main__":
    main()
