"""A ``StopIteration`` that a user's function lets out looks like the end of the data, which it is not."""

from __future__ import annotations

import logging
import sys
import weakref
from types import CodeType, TracebackType
from typing import Any

from torch._utils import ExceptionWrapper
from torchdata.nodes import BaseNode
from torchdata.nodes import map as torchdata_map

__all__ = ["refuse_early_end", "report_early_end"]

logger = logging.getLogger(__name__)

#: Nodes whose end has been reported, by id: they are asked again by each node above.
_reported: weakref.WeakValueDictionary[int, BaseNode[Any]] = weakref.WeakValueDictionary()

#: Where torchdata's Mapper calls the function; should the name change, nothing is found.
_CALLS: CodeType | None = getattr(
    getattr(getattr(torchdata_map, "_InlineMapperIter", None), "__next__", None), "__code__", None
)
_FROM_WORKER = ExceptionWrapper.reraise.__code__
_ASKS_SOURCE = BaseNode.__next__.__code__


def refuse_early_end(end: StopIteration) -> None:
    """Raise when the end of the data came from the function of a ``Mapper``, not from its source.

    Args:
        end: what a node of the graph raised.

    Raises:
        RuntimeError: it did; training would have ended early, and quietly.
    """
    trace = end.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is _FROM_WORKER or (code is _CALLS and not _is_in(trace.tb_next, _ASKS_SOURCE)):
            raise RuntimeError(
                "the function of a Mapper raised StopIteration, which would end the data early and quietly; catch it "
                "there (next(iterator, default) raises none)"
            ) from end
        trace = trace.tb_next


def report_early_end(node: BaseNode[Any]) -> None:
    """Log that a user's node has ended although what it draws from has samples left.

    It may be meant to. But a ``StopIteration`` that its ``next`` lets out by mistake, which nothing can tell from an
    end, or an error that torchdata's ``Prefetcher`` takes for one, looks just like this.

    Args:
        node: has raised ``StopIteration``; nothing is logged for nodes of this package, which end where their sources
            do.
    """
    foreign: list[BaseNode[Any]] = []
    below: Any = node
    while isinstance(below, BaseNode) and not hasattr(below, "num_remaining"):
        if not type(below).__module__.startswith(f"{__package__}."):
            foreign.append(below)
        elif getattr(below, "left_out", None):  # perhaps to the end of the data
            return
        below = getattr(below, "source", None)
    if not foreign or not isinstance(below, BaseNode) or not getattr(below, "is_open", False):
        return
    if any(id(one) in _reported for one in foreign):
        return
    left = below.num_remaining()
    if left:
        _reported.update((id(one), one) for one in foreign)
        logger.warning(
            "%s ended, but %s, from which it draws, has %s samples left. If it is not meant to end there, look for a "
            "StopIteration that its next() lets out, such as that of next(iterator) without a default",
            " <- ".join(type(one).__name__ for one in foreign),
            type(below).__name__,
            "endless" if left == sys.maxsize else left,
        )


def _is_in(trace: TracebackType | None, code: CodeType) -> bool:
    return trace is not None and trace.tb_frame.f_code is code
