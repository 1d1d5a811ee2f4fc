"""The process groups Megatron needs, and the sums over data-parallel ranks.

One rank opens no socket: its group is a local one whose collectives fail rather than pretend.
More ranks meet in a file, so no address or port is configured either.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store

_SOLO = "solo"


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Which rank this process is.

    Attributes:
        rank: from 0.
        rank_count: data-parallel ranks.
        rendezvous: the file where more than one rank meet; all name the same, new file.
        device: "cpu" or "cuda".
        timeout_seconds: for a collective.
    """

    rank: int = 0
    rank_count: int = 1
    rendezvous: Path | None = None
    device: str = "cpu"
    timeout_seconds: float = 300.0


class _SoloGroup(dist.ProcessGroup):
    """A group of one: it has a rank and a size, and nobody to talk to."""

    def getBackendName(self) -> str:  # noqa: N802 (the name torch calls)
        return _SOLO


def _make_solo(store: Store, rank: int, size: int, timeout: dt.timedelta) -> dist.ProcessGroup:
    del store, timeout
    if size != 1:
        raise ValueError(f"a solo group has one rank, not {size}")
    return _SoloGroup(rank, size)  # type: ignore[call-arg] # the stub lacks this overload


def join_ranks(options: RankOptions) -> None:
    """Initialise torch.distributed for this process, once.

    Raises:
        ValueError: several ranks without a rendezvous file, or already joined differently.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (options.rank, options.rank_count):
            raise ValueError("this process already is another rank")
        return
    timeout = dt.timedelta(seconds=options.timeout_seconds)
    store: Store
    if options.rank_count == 1:
        store = HashStore()
    elif options.rendezvous is None:
        raise ValueError(f"{options.rank_count} ranks need a rendezvous file")
    else:
        store = FileStore(str(options.rendezvous), options.rank_count)
    backend = _SOLO if options.rank_count == 1 else "gloo"
    if options.device == "cuda":
        backend = "nccl"
    if backend == _SOLO and not hasattr(dist.Backend, _SOLO.upper()):
        dist.Backend.register_backend(_SOLO, _make_solo, devices=["cpu"])
    dist.init_process_group(
        backend, store=store, rank=options.rank, world_size=options.rank_count, timeout=timeout
    )


def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """Sum each tensor over the ranks, in place; a no-op for one rank."""
    if dist.get_world_size() == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum the gradients of every parameter over the ranks; ranks without one give zeros."""
    if dist.get_world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
