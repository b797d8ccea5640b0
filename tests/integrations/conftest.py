"""The code of a page of docs/, to be run as it stands there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tdp_megatron.testing import write_corpus

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str) -> str:
    """All Python blocks of a page, one after the other, at the lines they have there."""
    text = (DOCS / page).read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block.group(1).splitlines()):
            lines[first + number] = line
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def page_code() -> Callable[[str], str]:
    """Gives the code of a page as text."""
    return code_of


@pytest.fixture(scope="session")
def run_page() -> Callable[[str], dict[str, Any]]:
    """Runs the code of a page and gives the names it defines."""

    def run(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": page}
        exec(compile(code_of(page), str(DOCS / page), "exec"), names)
        return names

    return run


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 60 tokens below 256 that a small model learns quickly."""
    rng = np.random.default_rng(7)
    path = tmp_path_factory.mktemp("documents") / "d"
    return write_corpus(path, [np.minimum(rng.geometric(0.1, n), 255) for n in rng.integers(1, 60, 200)])


class PackedAttention(torch.nn.Module):
    """Causal attention inside each packed sequence; megatron-core's own, without Transformer Engine, refuses packs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> torch.Tensor:
        lengths = [b - a for a, b in itertools.pairwise(packed_seq_params.cu_seqlens_q_padded.tolist())]
        parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        outputs = [
            scaled_dot_product_attention(*(p.transpose(0, 1) for p in part), is_causal=True).transpose(0, 1)
            for part in parts
        ]
        return torch.cat(outputs).flatten(1)


@pytest.fixture(scope="session")
def packed_attention() -> type:
    """An attention for megatron-core's layers that takes packs on a CPU."""
    return PackedAttention


@pytest.fixture
def no_compile() -> Iterator[None]:
    """megatron-core compiles small functions, which takes longer than a test."""
    with torch._dynamo.config.patch(disable=True):
        yield


class OnCpu(TorchFunctionMode):
    """Tensors that megatron-core's schedules ask of a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Code that asks for the current GPU gets the CPU."""
    with (
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self),
        OnCpu(),
    ):
        yield


@pytest.fixture(scope="session")
def on_cpu() -> Callable[[], AbstractContextManager[None]]:
    """Makes a context in which megatron-core's CUDA code runs on the CPU."""
    return cuda_is_the_cpu
