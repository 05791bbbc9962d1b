"""torch's default process group, where a world has opened it: it ends with that world.

To end it is to wait for what is pending in it, and so for peers. In peace that is right, since they
may still come to it. After a failure perhaps nobody ever does, and nobody waits: Gloo's groups are
forgotten and left as they are, to the process's end. NCCL's are left to torch, which aborts what is
pending there as Python exits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from .engines import LONG, keep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncprims.interface import Topology

dist: Any = torch.distributed  # its types leave out what its documentation names


class DefaultGroup:
    """What a world has to do with the default group: nothing, unless it opens it."""

    def __init__(self) -> None:
        self._ours = False

    def open(self, store: Any, topology: Topology, device: int | None) -> None:
        """Make the group: Gloo's, and with a CUDA device, which it need not guess, NCCL's."""
        options: dict[str, Any] = {"backend": "gloo"}
        if device is not None:
            options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", device)}
        dist.init_process_group(
            **options, store=store, rank=topology.rank, world_size=topology.world_size, timeout=LONG
        )
        self._ours = True

    def close(self, *, in_peace: bool) -> None:
        """End the group if it is ours, and all that the program has made from it."""
        ours, self._ours = self._ours, False
        if not (ours and dist.is_initialized()):
            return
        if in_peace or self._keep_gloo():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave the group to the parent, in a forked child: Gloo's threads are not there to end."""
        if self._ours and dist.is_initialized():
            self._keep_gloo()

    def _keep_gloo(self) -> bool:
        """Let nothing destroy Gloo's groups; tell whether there are no others."""
        alone = True
        for backend in _backends():
            if backend._get_backend_name() == "gloo":
                keep(backend)
            else:
                alone = False
        return alone


def _backends() -> Iterator[Any]:
    """Give what carries the data of each group, for each kind of device."""
    # Torch has no public name for either, and the program may have made groups that we never saw.
    for group in dist.distributed_c10d._world.pg_map:
        for device in group._device_types:
            yield group._get_backend(device)
