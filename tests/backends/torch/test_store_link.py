"""The thread that waits for the store, after the store is gone."""

from __future__ import annotations

import queue
import time
import traceback
from importlib import import_module
from typing import Any

import pytest
from support.rank_worlds import PATIENCE

store: Any = import_module("syncprims.backends.torch.store")


class Recording(queue.SimpleQueue[Any]):
    """Keeps how long a reader of it would wait."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.waits.append(timeout)
        return super().get(block, timeout)


def refuse(store: object) -> None:
    raise RuntimeError("Connection reset by peer")


@pytest.fixture
def broken() -> Any:
    """A link with a heartbeat, until the store went."""
    link = store.StoreLink("test", object, every=0.001, beat=refuse)
    vars(link)["_requests"] = Recording()
    with pytest.raises(store.StoreGone, match="Connection reset by peer"):
        link.ask(lambda store: "never", PATIENCE)
    yield link
    link.close()


def test_a_link_whose_store_is_gone_sleeps_until_it_is_asked(broken: Any) -> None:
    waits = vars(broken)["_requests"].waits
    deadline = time.monotonic() + PATIENCE
    while waits[-1] is not None:
        assert time.monotonic() < deadline, "it never comes to rest"
        time.sleep(0.001)
    seen = len(waits)
    assert broken.submit(refuse).exception(PATIENCE) is not None
    assert set(waits[seen:]) <= {None}, "it sleeps on"


def test_what_broke_it_is_told_each_time_and_takes_no_more_room(broken: Any) -> None:
    def frames() -> int:
        return len(list(traceback.walk_tb(broken.broken.__traceback__)))

    before = frames()
    futures = [broken.submit(lambda store: "never") for _ in range(100)]
    errors = {str(future.exception(PATIENCE)) for future in futures}
    assert errors == {"Connection reset by peer"}
    assert frames() == before
    with pytest.raises(store.StoreGone, match="Connection reset by peer"):
        broken.ask(lambda store: "never", PATIENCE)
