"""Random samples, packs and options: every backend equals the packs built token by token."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdp_megatron.ops.pads import DEFAULT_PADS, MEGATRON_PADS, PadRules


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


cases = load("pack_cases")
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]
EXTRAS = {"a": (torch.float32, ()), "b": (torch.bfloat16, ()), "c": (torch.int16, (3,)), "d": (torch.bool, (2, 2))}


@st.composite
def any_case(draw: st.DrawFn) -> Any:
    seqlens = draw(st.lists(st.integers(0, 40) | st.sampled_from([1, 2, 3, 8, 16]), max_size=10))
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    left = draw(st.permutations(range(len(seqlens))))
    packs: list[tuple[int, int, list[int]]] = []
    while True:
        cp = draw(st.sampled_from([k for k in (1, 2, 4) if k <= num_ranks]))
        count = draw(st.integers(0, len(left)))  # 0 for a dummy
        packs.append((draw(st.integers(0, num_ranks // cp - 1)) * cp, cp, left[:count]))
        left = left[count:]
        if not left:
            break
        if len(packs) == 4:
            packs.append((0, 1, left))
            break
    spans = None
    if draw(st.booleans()):
        edges = [sorted(draw(st.lists(st.integers(0, n + 2), max_size=6))) for n in seqlens]
        spans = [list(zip(e[::2], e[1::2], strict=False)) for e in edges]
    given_keys = draw(st.sets(st.sampled_from(["labels", "loss_mask", "position_ids"])))
    return cases.Case(
        seqlens=seqlens,
        packs=packs,
        num_ranks=num_ranks,
        tail_multiple=draw(st.sampled_from([2, 6, 16])),
        dtype=draw(st.sampled_from(DTYPES)),
        extra_token=draw(st.booleans()),
        given=tuple(sorted(given_keys)),
        loss_spans=spans,
        extras={k: EXTRAS[k] for k in sorted(draw(st.sets(st.sampled_from("abcd"), max_size=2)))},
        pads=draw(st.sampled_from([DEFAULT_PADS, MEGATRON_PADS, PadRules(token=3, label=-1)])),
        gap=draw(st.integers(0, 2)),
    )


@settings(max_examples=200, deadline=None)
@given(any_case())
def test_native_and_reference(case: Any) -> None:
    cases.check(case, backend="native")
    cases.check(case, backend="reference")


@settings(max_examples=25, deadline=None)
@given(any_case())
def test_triton(case: Any) -> None:
    cases.check(case, backend="triton")
