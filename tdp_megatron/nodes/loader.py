"""``Loader``: torchdata's, with the right defaults, statistics and skipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from torchdata.nodes import BaseNode
from torchdata.nodes import Loader as TorchdataLoader
from torchdata.nodes.loader import LoaderIterator

from tdp_megatron.arguments import checked_int
from tdp_megatron.nodes.base import BeyondEndError, require_node, skip_samples
from tdp_megatron.nodes.blend import Blend
from tdp_megatron.nodes.early_end import refuse_early_end, report_early_end
from tdp_megatron.nodes.loader_state import check_loader_state
from tdp_megatron.stats import NodeStats

__all__ = ["Loader", "pipeline_stats"]

T = TypeVar("T")


class Loader(TorchdataLoader[T]):
    """Iterates over a graph of nodes; a ``Stateful`` for checkpoints.

    Call ``iter`` once per run: every call begins anew, or where ``load_state_dict`` says. The state is the same on
    every rank, so that one copy in a checkpoint is enough.

    Args:
        root: last node of the graph.
        restart_on_stop_iteration: begin again after the end; off, because it draws an item in advance.

    Raises:
        TypeError: root is no node.
    """

    def __init__(self, root: BaseNode[T], restart_on_stop_iteration: bool = False) -> None:
        require_node(root)
        super().__init__(root, restart_on_stop_iteration=restart_on_stop_iteration)

    def __iter__(self) -> Iterator[T]:
        if self._it is None:
            self._it: LoaderIterator[T] | None = _CheckedIterator(self)
        steps: Iterator[T] = super().__iter__()
        return steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next ``iter`` go on from a saved state, also where ``state_dict`` has been asked for in between.

        Raises:
            TypeError: it is no mapping, such as None, which would begin the data anew.
            StateMismatchError: it is none that ``state_dict`` gave, such as the whole checkpoint it is a part of.
        """
        check_loader_state(state_dict)
        super().load_state_dict(state_dict)
        # torchdata would hand out the iteration that state_dict() has begun and forget the loaded state;
        # torch.distributed.checkpoint asks for the state before it loads one.
        self._iter_for_state_dict = False

    def stats(self) -> dict[str, Any]:
        """What every node of the graph has done since it was made, by node.

        Returns:
            Per node ``NodeStats.as_dict``; for a ``Blend`` also ``"sources"``, one ``SourceReport`` as a dict per
            source. A node without counters has an empty dict.
        """
        return pipeline_stats(self.root)

    def skip_to(self, step: int) -> None:
        """Go on with step ``step`` of the running iteration, or begin the next ``iter`` there; nothing is read.

        Raises:
            TypeError: the root cannot skip.
            ValueError: it lies behind the present position, or beyond the end of the data.
        """
        skip = getattr(self.root, "skip_to", None)
        if skip is None:
            raise TypeError(f"{type(self.root).__name__} cannot skip; it has no skip_to")
        if self._it is None or self._next_iter_state_dict is not None:
            # The next iter would go back to its beginning; as for state_dict, it begins now and is handed out then.
            iter(self)
            self._iter_for_state_dict = True
        skip(step)


class _CheckedIterator(LoaderIterator[T]):
    """torchdata's, but that not everything that looks like the end is taken for it; loops move it themselves."""

    def next(self) -> T:
        try:
            item: T = super().next()
        except StopIteration as end:
            refuse_early_end(end)
            report_early_end(self.loader.root)
            raise
        return item

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved state."""
        check_loader_state(state_dict)
        self.reset(state_dict)

    def stats(self) -> dict[str, Any]:
        """What every node has done; see ``Loader.stats``."""
        return pipeline_stats(self.root)

    @property
    def position(self) -> int:
        """Items behind which it stands; 0 at the beginning of the data."""
        own = getattr(self.root, "position", None)
        return own if isinstance(own, int) else int(self._num_yielded)

    def skip_items(self, n: int) -> None:
        """Pass over the next ``n`` items; nothing is read, but items of a user's node are drawn.

        Raises:
            StopIteration: there are fewer.
        """
        n = checked_int("n", n, least=0)
        self.state_dict()  # resets at the first use
        if n and getattr(self, "_cached_item", None) is not None:  # drawn in advance with restart_on_stop_iteration
            super().next()
            n -= 1
        try:
            skip_samples(self.root, n)
        except BeyondEndError as error:
            raise StopIteration from error
        self._num_yielded += n


def pipeline_stats(root: BaseNode[Any]) -> dict[str, Any]:
    """Statistics of all nodes of a graph by name; nodes of one kind are numbered from the root on."""
    stats: dict[str, Any] = {}
    waiting: list[BaseNode[Any]] = [root]
    while waiting:
        node = waiting.pop(0)
        kind = type(node).__name__
        name = kind if kind not in stats else f"{kind}.{sum(key.split('.')[0] == kind for key in stats)}"
        counters = getattr(node, "stats", None)
        stats[name] = counters.as_dict() if isinstance(counters, NodeStats) else {}
        if isinstance(node, Blend) and node.is_open:
            stats[name]["sources"] = {report.name: dataclasses.asdict(report) for report in node.report()}
        inner = [getattr(node, "source", None), *getattr(node, "sources", ())]
        waiting += [source for source in inner if isinstance(source, BaseNode)]
    return stats
