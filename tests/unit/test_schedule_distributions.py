"""Named length distributions: size of the batch, shares of the parts, repeatability."""

from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron.schedule.distributions import DISTRIBUTIONS, global_batch_seqlens


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_batch_reaches_its_tokens_with_its_last_sequence(name):
    seqlens = global_batch_seqlens(name, 1_000_000, seed=3)
    assert seqlens.sum() >= 1_000_000 > seqlens[:-1].sum()
    assert seqlens.min() >= 1
    assert seqlens.max() <= 131_072
    np.testing.assert_array_equal(seqlens, global_batch_seqlens(name, 1_000_000, seed=3))
    assert not np.array_equal(seqlens, global_batch_seqlens(name, 1_000_000, seed=4))


@pytest.mark.parametrize(("name", "median"), [("github", 1200), ("sft_chat", 607), ("reasoning", 6000)])
def test_medians(name, median):
    assert np.median(global_batch_seqlens(name, 50_000_000)) == pytest.approx(median, rel=0.05)


def test_shares_by_tokens():
    seqlens = global_batch_seqlens("prolong", 200_000_000)
    # 73 % of the tokens of the short part, which is 40 % of all, and 2 % of those of the code part lie below 5000.
    assert seqlens[seqlens < 5000].sum() / seqlens.sum() == pytest.approx(0.30, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"), [(("wiki", 10), "unknown distribution 'wiki'"), (("github", 0), "got 0")]
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        global_batch_seqlens(*arguments)
