"""``Reroute``: from a planned global batch to this rank's microbatches."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode

from tdp_megatron.arguments import checked_int
from tdp_megatron.distributed import DpCpGroups, HostGroup, require_equal, sum_int64
from tdp_megatron.errors import StateMismatchError, TdpError
from tdp_megatron.nodes.base import Node, require_node
from tdp_megatron.nodes.configuration import configuration_of, digest_of_configuration, state_of
from tdp_megatron.nodes.pack import GlobalBatch, Pack
from tdp_megatron.nodes.shard import Shard
from tdp_megatron.schedule import padding
from tdp_megatron.types import PackedBatch, Step

__all__ = ["Reroute"]


class Reroute(Node[Step]):
    """Yields one ``Step`` per global batch: the packed microbatches of this rank and what all ranks share.

    Whether tokens are read by plan or swapped by exchange is decided by ``Pack``; both give the same batches.

    Args:
        source: a ``Pack`` or a ``StreamPack``.
        rank: DP x CP rank; None takes it from ``groups``, or 0.
        groups: process groups; needed with more than one rank where batches must carry their CP group, where the
            loss tokens depend on content, and for ``agree_every``.
        pad_id: token id at pads.
        device: where the packs are wanted, such as "cuda"; None leaves them in host memory. Behind ``Prefetch``, name
            the device with its number: the thread that reads ahead works on the default stream of that device.
        agree_every: every this many steps, compare what all ranks must have alike: the plan, the samples, and the
            configuration of the nodes with the first and last tokens of their files (with an exchange, of the order
            that shards deal out); 0 for never.

    Raises:
        ValueError, TypeError: a bad argument.
        TypeError: at a step, a source that gives something else than ``GlobalBatch``es.
        TdpError: at a step, loss tokens that depend on content on several ranks without ``groups``.
        ExchangeError: at a step, when ranks disagree, fail or are late.
    """

    def __init__(
        self,
        source: BaseNode[GlobalBatch],
        *,
        rank: int | None = None,
        groups: DpCpGroups | None = None,
        pad_id: int = 0,
        device: torch.device | str | None = None,
        agree_every: int = 0,
    ) -> None:
        super().__init__()
        require_node(source)
        if rank is None:
            rank = 0 if groups is None else groups.rank
        rank = checked_int("rank", rank, least=0)
        if groups is not None and rank != groups.rank:
            raise ValueError(f"rank {rank} is not this process's rank {groups.rank} in groups")
        agree_every = checked_int("agree_every", agree_every, least=0)
        if agree_every and groups is None:
            raise ValueError("agree_every must not be negative, and needs groups")
        self.source = source
        self.rank = rank
        self.groups = groups
        self.pad_id = checked_int("pad_id", pad_id)
        self.device = None if device is None else torch.device(device)
        self.agree_every = agree_every
        self._by_plan = getattr(source, "exchange", None) is None
        self._pipeline = ""
        self._configuration: tuple[dict[str, str], bytes] | None = None
        self._is_made_ahead = False
        self._name = f"reroute {id(self)}"

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def _restart(self, position: int, state: Mapping[str, Any] | None) -> None:
        inner = None if state is None else state[self.SOURCE_KEY]
        packed = inner.get(self.POSITION_KEY) if isinstance(inner, Mapping) and isinstance(self.source, Pack) else None
        # It can be ahead: of global batches that are left out, this node knows only once the next step is made.
        if isinstance(packed, int) and packed < position:
            raise StateMismatchError(
                f"Reroute: the saved state says {position} steps, but its Pack {packed} global batches: they are from "
                "different moments. Load a state as it was saved"
            )
        self.source.reset(None if state is None else state[self.SOURCE_KEY])
        self._pipeline = "" if self.groups is None else _order_of(self.source)
        self._configuration = None

    _source_state_keys = ("source",)

    def _source_state(self) -> dict[str, Any]:
        return {self.SOURCE_KEY: self.source.state_dict()}

    def _next(self) -> Step:
        host = None if self.groups is None else self.groups.data
        if host is not None:
            host.watch(self._name)
        with nullcontext() if host is None else host.telling_failures(self._position, self._name):
            with self.stats.waiting():
                try:
                    batch = next(self.source)
                except StopIteration:
                    self._agree_on_end()
                    raise
            with self.stats.working():
                step = self._step(batch)
        self._position = step.index + 1
        self.stats.items += 1
        self.stats.tokens += sum(b.num_tokens for b in step.batches)
        # From the plan, of all ranks: counting pads in the batches would wait for the device they are on.
        self.stats.observe("padding", padding(step.plan))
        return step

    def check_before_use(self, step: Step) -> None:
        """Look once more before a step that was made ahead is handed out.

        By exchange the ranks meet in every step, and learn of failures there.

        Raises:
            ExchangeError: another rank has told that it cannot make this step or an earlier one.
        """
        self._is_made_ahead = True
        if self.groups is not None:
            self.groups.data.note_use(self._pipeline, step.index)
        self._raise_if_told(step.index)

    def _raise_if_told(self, index: int) -> None:
        if self.groups is not None and self._by_plan:
            self.groups.data.raise_if_told(index)

    def skip_to(self, step: int) -> None:
        """Go on with global batch ``step``; nothing is read.

        Raises:
            TypeError: the source cannot skip.
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        if not self._is_open:
            self.reset(None)
        skip = getattr(self.source, "skip_to", None)
        if skip is None:
            raise TypeError(f"{type(self.source).__name__} cannot skip; it has no skip_to")
        step = checked_int("step", step)
        skip(step)
        self._position = step

    def _agree_on_end(self) -> None:
        """By exchange the ranks have agreed on it already; by plan, compare where the data ended."""
        if self.groups is None or not self._by_plan:
            return
        host, step = self.groups.data, self._position
        if self.agree_every and step % self.agree_every == 0:
            host.begin_step(step)
            require_equal(host, "", _compared(step))
        if self._pipeline:
            host.note_end(self._pipeline, step, self._name)

    def _step(self, batch: GlobalBatch) -> Step:
        if not isinstance(batch, GlobalBatch):
            raise TypeError(f"Reroute needs planned global batches of Pack or StreamPack, got {type(batch).__name__}")
        self._by_plan = batch.exchange is None
        if self.groups is not None:
            # Only a step that the loop has been given counts as reached; where another thread makes them, and no
            # Prefetch right behind this node says which it hands out, messages alone know of it.
            is_ahead = self._is_made_ahead or threading.current_thread() is not threading.main_thread()
            self.groups.data.note_use("" if is_ahead else self._pipeline, None if self._is_made_ahead else batch.index)
        self._raise_if_told(batch.index)
        if self.agree_every and self.groups is not None and batch.index % self.agree_every == 0:
            host = _begun(self.groups.data, batch)
            digest = self._digest(batch)
            require_equal(host, digest, _compared(batch.index), self._compared_configuration()[0])
        if self.groups is None:
            batches = batch.pack(self.rank, pad_id=self.pad_id, device=self.device)
        else:
            batches = batch.pack(self.rank, pad_id=self.pad_id, device=self.device, cp_group=self.groups.cp_group)
        datasets, counts = np.unique(batch.refs[:, 0], return_counts=True)
        return Step(
            index=batch.index,
            rank=self.rank,
            batches=batches,
            plan=batch.plan,
            num_samples_global=len(batch.seqlens),
            num_loss_tokens_global=self._loss_tokens(batch, batches),
            seqlen_sum=int(batch.seqlens.sum()),
            seqlen_squared_sum=sum(s * s for s in batch.seqlens.tolist()),
            source_counts=dict(zip(datasets.tolist(), counts.tolist(), strict=True)),
        )

    def _digest(self, batch: GlobalBatch) -> str:
        """SHA-256 of what the ranks must agree on: the plan, the samples in it, and the order that shards deal out."""
        digest = hashlib.sha256(bytes.fromhex(batch.plan.digest()))
        # Samples of one length make equal plans in any order.
        digest.update(np.ascontiguousarray(batch.refs).tobytes())
        shard = self._shard()
        if shard is not None:
            digest.update(json.dumps(shard.state_dict(), sort_keys=True).encode())
        digest.update(self._compared_configuration()[1])
        return digest.hexdigest()

    def _shard(self) -> Shard | None:
        node: object = self.source
        while isinstance(node, BaseNode) and not isinstance(node, Shard):
            node = getattr(node, "source", None)
        return node if isinstance(node, Shard) else None

    def _compared_configuration(self) -> tuple[dict[str, str], bytes]:
        """What the ranks must have alike of the nodes, and its digest; gathered once after each reset."""
        if self._configuration is None:
            # With an exchange, what lies below the Pack is each rank's own, but for what shards deal out.
            root = self.source if self._by_plan else self._shard()
            facts = {} if root is None else configuration_of(root)
            self._configuration = facts, digest_of_configuration(facts)
        return self._configuration

    def _loss_tokens(self, batch: GlobalBatch, batches: tuple[PackedBatch, ...]) -> int:
        if (batch.num_loss_tokens >= 0).all():
            return int(batch.num_loss_tokens.sum())
        # The loss mask depends on what was read, and each rank has read only its share.
        mine = sum(int(b.loss_mask.count_nonzero()) for b in batches)
        if batch.plan.layout.num_ranks == 1:
            return mine
        if self.groups is None:
            raise TdpError(
                "the number of loss tokens depends on the content (eod_mask_loss), which no rank reads as a whole; "
                "give Reroute its groups"
            )
        return sum_int64(_begun(self.groups.data, batch), mine, f"step {batch.index}: counting loss tokens")


def _order_of(source: BaseNode[Any]) -> str:
    """Digest of what decides the steps: the same for pipelines of one order; empty for nodes without a state."""
    # What it leaves out at the end is in no fingerprint, as a state may be continued otherwise.
    found: list[Any] = [getattr(source, "drop_last", None)]
    state = state_of(source)
    if state is None:
        return ""
    while isinstance(state, Mapping):
        found.append(state.get(Node.FINGERPRINT_KEY))
        state = state.get(Node.SOURCE_KEY)
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _compared(step: int) -> str:
    return f"the plan or the order of the samples of step {step}"


def _begun(host: HostGroup, batch: GlobalBatch) -> HostGroup:
    """The group, told that this rank has come to this step; an exchange has told it already."""
    if batch.exchange is None or batch.exchange.host is not host:
        host.begin_step(batch.index)
    return host
