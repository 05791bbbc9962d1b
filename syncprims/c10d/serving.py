"""Programs that ask for another backend, served by this one under the name they ask for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .torch_internals import replace_group_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


def start_serving() -> Callable[[], None]:
    """Serve every later process group of this process, and return what ends that."""
    return replace_group_maker()


@contextlib.contextmanager
def serve_every_backend() -> Generator[None]:
    """Serve, within the block, every process group of this process, whatever backend it names.

    ``torch.distributed.get_backend`` returns the name that the program asked for.
    """
    undo = start_serving()
    try:
        yield
    finally:
        undo()
