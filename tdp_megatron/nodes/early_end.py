"""A ``StopIteration`` that a user's function lets out looks like the end of the data, which it is not."""

from __future__ import annotations

from types import CodeType, TracebackType

from torch._utils import ExceptionWrapper
from torchdata.nodes import BaseNode
from torchdata.nodes import map as torchdata_map

__all__ = ["refuse_early_end"]

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


def _is_in(trace: TracebackType | None, code: CodeType) -> bool:
    return trace is not None and trace.tb_frame.f_code is code
