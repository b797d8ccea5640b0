"""What is no state of a ``Loader`` is refused where it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.errors import StateMismatchError
from tdp_megatron.nodes import DocumentSample, IndexedRead, Loader, Pack, Reroute
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import ParallelLayout

State = dict[str, Any]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Loader[Any]]:
    folder: Path = tmp_path_factory.mktemp("states")
    prefix = write_corpus(folder / "d", [np.arange(n) for n in range(1, 30)])

    def loader() -> Loader[Any]:
        samples = DocumentSample(IndexedRead(prefix), max_seqlen=60)
        return Loader(Reroute(Pack(samples, ParallelLayout(1, 1, 64), global_batch_size=4)))

    return loader


@pytest.mark.parametrize(
    ("state_of", "error", "message"),
    [
        (lambda s: None, TypeError, "got None; to begin at the first sample, do not call it"),
        (lambda s: [s], TypeError, "what Loader.state_dict() gave, got list"),
        (lambda s: "data", TypeError, "got str"),
        (lambda s: {}, StateMismatchError, "it has no 'root', but nothing at all; to begin at the first sample"),
        (lambda s: {"model": {}, "data": s}, StateMismatchError, "'model', 'data'; its part 'data' is one: load that"),
        (lambda s: {"model": {}, "step": 3}, StateMismatchError, "it has no 'root', but 'model', 'step'; load what"),
        (lambda s: s["root"], StateMismatchError, "it has no 'root'"),
        (lambda s: {"root": s["root"]}, StateMismatchError, "it has no 'num_yielded', but 'root'"),
        (lambda s: {**s, "root": None}, StateMismatchError, "holds None under 'root'"),
        (lambda s: {**s, "num_yielded": -1}, StateMismatchError, "must be a number from 0 up, found -1"),
        (lambda s: {**s, "num_yielded": "3"}, StateMismatchError, "must be a number from 0 up, found '3'"),
        (lambda s: {str(i): i for i in range(99)}, StateMismatchError, "'7', ...; load what"),
    ],
)
@pytest.mark.parametrize("of", ["loader", "iterator"])
def test_no_state_is_refused_at_once_and_changes_nothing(
    make: Callable[[], Loader[Any]], of: str, state_of: Callable[[State], Any], error: type[Exception], message: str
) -> None:
    loader = make()
    steps: Any = iter(loader)
    next(steps)
    state = loader.state_dict()
    with pytest.raises(error) as caught:
        (loader if of == "loader" else steps).load_state_dict(state_of(state))
    assert message in str(caught.value)
    assert next(steps).index == 1
    loader.load_state_dict(state)
    assert next(iter(loader)).index == 1
