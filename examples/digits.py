"""Learn handwritten digits on several ranks, with numpy only.

This is plain data-parallel training: each rank computes the gradient of its share of every batch,
and all ranks update the same weights with the mean over the ranks. If a rank is lost, the others
repeat the step that it has left, and go on.

    syncprims run -n 4 examples/digits.py
    syncprims run --elastic 2:4 examples/digits.py
    python examples/digits.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from syncprims import (
    PeerFailed,
    PeerLost,
    Trigger,
    all_reduce,
    assert_same,
    get_world_size,
    hand_over,
    init,
    is_main,
    main_first,
    on_main,
    print_main,
    reform,
    split,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[np.float64]]

BATCH, PATIENCE = 120, 5


def train(cache: Path, epochs: int) -> Arrays:
    change = init().change  # None, unless this process replaces a lost rank of a run
    if change is None:
        with main_first(name="prepare digits"):  # rank 0 writes the cache, then the others read it
            data = prepare(cache)
    else:
        data = prepare(cache)
    learn, held_out = cut(data, 0, 1440), cut(data, 1440, None)
    steps = 1440 // BATCH  # of an epoch
    state: dict[str, Any] = {"step": 0, "weights": fresh_weights(), "best": math.inf, "since": 0}
    stop = Trigger("early stop")

    while state["step"] < epochs * steps:
        try:
            if change is not None:
                state, change = hand_over(state, change), None
            batch = shuffled_batch(learn, *divmod(state["step"], steps))
            slopes = all_reduce(gradients(state["weights"], split(batch)), "mean")
            state = descend(state, slopes)
            epoch, left = divmod(state["step"], steps)
            if left == 0:
                state = judge(state, held_out, epoch - 1, stop)
            if stop.check():  # one rank decides, all ranks stop at the same step
                print_main(f"stopped after epoch {epoch - 1}: {stop.reason}")
                break
            if stop.joiners:
                change = reform()
        except (PeerLost, PeerFailed):
            change = reform()
        if change is not None:
            said = f"step {state['step']}: {len(change.lost)} lost, {len(change.joined)} joined"
            print_main(f"{said}, {get_world_size()} ranks continue")

    assert_same(state["weights"], "weights")  # raises if ranks differ, and names them
    print_main(f"{get_world_size()} ranks hold the same weights, bit for bit")
    weights: Arrays = state["weights"]
    return weights


def judge(state: dict[str, Any], held_out: Arrays, epoch: int, stop: Trigger) -> dict[str, Any]:
    """Return the state with the best loss so far, and how many epochs ago that was."""
    loss, hits = evaluate(state["weights"], held_out)
    if epoch % 5 == 0:
        print_main(f"epoch {epoch:2d}: held-out loss {loss:.3f}, {hits:.1%} right")
    better = loss < state["best"] - 1e-3
    since = 0 if better else state["since"] + 1
    if is_main() and since >= PATIENCE:
        stop.set(f"no better for {PATIENCE} epochs, {hits:.1%} right")
    return {**state, "best": loss if better else state["best"], "since": since}


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


def shuffled_batch(data: Arrays, epoch: int, number: int) -> Arrays:
    """Return a batch of an epoch, the same on every rank: the seed is the epoch."""
    order = np.random.default_rng(epoch).permutation(len(data["x"]))
    chosen = order[number * BATCH : (number + 1) * BATCH]
    return {name: array[chosen] for name, array in data.items()}


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


def descend(state: dict[str, Any], slopes: Arrays) -> dict[str, Any]:
    """Return the state after one more step."""
    before = state.get("speed") or {name: np.zeros_like(array) for name, array in slopes.items()}
    speed = {name: 0.9 * before[name] - 0.1 * slopes[name] for name in slopes}
    weights = {name: array + speed[name] for name, array in state["weights"].items()}
    return {**state, "step": state["step"] + 1, "weights": weights, "speed": speed}


def evaluate(w: Arrays, data: Arrays) -> tuple[float, float]:
    _, guess = forward(w, data["x"])
    right = guess.argmax(axis=1) == data["y"].argmax(axis=1)
    loss = -np.log((guess * data["y"]).sum(axis=1) + 1e-12).mean()
    return float(loss), float(right.mean())


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
