"""The only place that issues collectives: groups, gathering of lengths, the exchange, agreement of plans."""

from __future__ import annotations

from tdp_megatron.distributed.collectives import require_equal, sum_int64
from tdp_megatron.distributed.exchange import Exchange, GlobalSamples
from tdp_megatron.distributed.groups import DpCpGroups
from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.restarts import restart_store
from tdp_megatron.distributed.scatter_back import scatter_back

__all__ = [
    "DpCpGroups",
    "Exchange",
    "GlobalSamples",
    "HostGroup",
    "require_equal",
    "restart_store",
    "scatter_back",
    "sum_int64",
]
