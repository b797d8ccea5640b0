"""Whether the samples of a pack have the same per-sample keys: every rank looks at all packs, so that all end alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tdp_megatron.distributed.collectives import gather_texts
from tdp_megatron.distributed.host_group import HostGroup
from tdp_megatron.distributed.parcels import GlobalSamples
from tdp_megatron.errors import ExchangeError
from tdp_megatron.reading import FlatSamples
from tdp_megatron.schedule.plan import Plan
from tdp_megatron.types import Int64Array

__all__ = ["require_equal_value_keys", "value_key_digests"]


def value_key_digests(values: Sequence[Mapping[str, Any]]) -> Int64Array:
    """int64 [n], of the names of each sample's per-sample values; 0 for none."""
    known: dict[frozenset[str], int] = {frozenset(): 0}
    digests = np.zeros(len(values), dtype=np.int64)
    for i, sample in enumerate(values):
        names = frozenset(sample)
        if names not in known:
            text = json.dumps(sorted(map(str, names)))
            known[names] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1
        digests[i] = known[names]
    return digests


def require_equal_value_keys(
    host: HostGroup, step: int, plan: Plan, samples: GlobalSamples, local: FlatSamples
) -> None:
    """Refuse a pack of samples with different per-sample keys, on all ranks; without one, no rank talks to another.

    A rank that found it out only in its own pack would leave the others waiting in the training step.

    Raises:
        ExchangeError: naming two such samples and the keys that only one of them has.
    """
    keys = samples.value_keys
    if not len(keys) or (keys == keys[0]).all():
        return
    packed = keys[plan.sample_ids]
    op_of = np.repeat(np.arange(len(plan.op_first_rank)), np.diff(plan.op_offsets))
    firsts = plan.op_offsets[op_of]
    different = np.flatnonzero(packed != packed[firsts])
    if not len(different):
        return
    pair = [int(plan.sample_ids[at]) for at in (firsts[different[0]], different[0])]
    mine = {
        i: sorted(map(str, local.values[int(samples.local_index[i])] if local.values else ()))
        for i in pair
        if int(samples.owner[i]) == host.rank
    }
    found: dict[str, list[str]] = {}
    for text in gather_texts(host, json.dumps(mine), f"step {step}: comparing the keys of the samples"):
        found.update(json.loads(text))
    (one, other), (names, others) = (samples.refs[pair].tolist(), [set(found[str(i)]) for i in pair])
    raise ExchangeError(
        f"step {step}: samples {one[1]} of dataset {one[0]} and {other[1]} of dataset {other[0]} are in one pack, and "
        f"only one of them has {sorted(names ^ others)}; give every sample the same keys"
    )
