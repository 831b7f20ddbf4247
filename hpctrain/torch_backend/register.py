"""Registration of the back end and of its rendezvous with torch.distributed; MPI and the rest load at first use."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from hpctrain.errors import LaunchError
from hpctrain.torch_backend.requests import NAME, TIMEOUT, Takeover, kind_of, requested, watch


def register() -> None:
    """Register the back end and its rendezvous; repeated calls have no effect."""
    if NAME in dist.Backend.backend_list:
        return
    watch()
    _serve_one_process()
    _serve_monitored_barrier()
    _serve_batches()
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # The function torch.distributed.rendezvous hides the module of this name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    stock = handlers["env"]

    def env(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        """Rendezvous over MPI if a launcher started this process and no address is given, else torch's own."""
        return (rendezvous if _serves_env() else stock)(url, **options)

    handlers["env"] = env
    handlers[NAME] = rendezvous


def _serve_one_process() -> None:
    """Let ``init_process_group("hpctrain")`` without a launcher make a group of one: torch would ask for an address."""
    stock: Any = c10d.init_process_group
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def init_process_group(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options).arguments
        elsewhere = any(given.get(name) is not None for name in ("init_method", "store"))
        names = {part.rpartition(":")[2] for part in str(given.get("backend")).lower().split(",")}
        if NAME in names and not elsewhere and _is_alone():
            given["init_method"] = f"{NAME}://"
        stock(**given)

    for each in (c10d, dist):
        setattr(each, "init_process_group", init_process_group)


def _is_alone() -> bool:
    from hpctrain.cluster.launcher import is_launched

    elsewhere = "MASTER_ADDR" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    return not elsewhere and not is_launched()


def _serve_monitored_barrier() -> None:
    """Let ``dist.monitored_barrier`` serve our groups: torch's function refuses all back ends not called gloo."""
    stock: Any = c10d.monitored_barrier

    @functools.wraps(stock)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        module = sys.modules.get("hpctrain.torch_backend.group")  # before the first group of ours it is not loaded
        chosen = c10d._get_default_group() if group is None and dist.is_initialized() else group
        if module is None or not isinstance(chosen, module.HpctrainGroup):
            stock(group, timeout, wait_all_ranks)
            return
        if isinstance(timeout, float):  # as torch's function does
            timeout = timedelta(seconds=timeout)
        elif timeout is not None:
            c10d._check_valid_timeout(timeout)
        chosen.monitored_barrier(timeout, wait_all_ranks)

    for each in (c10d, dist):
        setattr(each, "monitored_barrier", monitored_barrier)


def _serve_batches() -> None:
    """Let ``dist.batch_isend_irecv`` send as one what NCCL carries in a group of two back ends.

    torch's function does that in groups of its own class only. NCCL would wait forever for single messages if both
    ranks send first.
    """
    stock: Any = c10d.batch_isend_irecv

    @functools.wraps(stock)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        if "hpctrain.torch_backend.device_group" not in sys.modules:  # it is loaded for the first such group
            return list(stock(p2p_op_list))
        from hpctrain.torch_backend import device_group

        return device_group.batch_isend_irecv(p2p_op_list, stock)

    for each in (c10d, dist):
        setattr(each, "batch_isend_irecv", batch_isend_irecv)


def _serves_env() -> bool:
    from hpctrain.cluster.launcher import is_launched

    return Takeover.rendezvous or ("MASTER_ADDR" not in os.environ and is_launched())


def rendezvous(url: str, timeout: timedelta = TIMEOUT, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield a store over MPI, the rank and the size. Collective in the first call."""
    from hpctrain.torch_backend.world import world

    everyone = world(timeout.total_seconds())
    parts = urlparse(url)
    query = parse_qs(parts.query)
    given = [query[name][0] if name in query else None for name in ("rank", "world_size")]
    everyone.check(_number(given[0], "rank"), _number(given[1], "world_size"), "init_process_group")
    if parts.scheme == "env":
        given = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
        everyone.check(_number(given[0], "RANK"), _number(given[1], "WORLD_SIZE"), "environment variables")
    yield PrefixStore(everyone.prefix(), everyone.store), everyone.rank, everyone.size


def _number(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text[:40]!r} is not a number: unset it, MPI knows the rank and the size") from None


def create(options: Any, _: Any = None) -> Any:
    """Return the process group of the ranks that torch names. Collective over them."""
    from hpctrain.torch_backend.group import HpctrainGroup
    from hpctrain.torch_backend.world import communicator

    ranks = list(options.global_ranks_in_group)
    comm = communicator(ranks, options.group_rank, options.group_size, options.timeout)
    kind = kind_of(HpctrainGroup, requested())
    return kind(comm, options.store, options.timeout, options.group_id)
