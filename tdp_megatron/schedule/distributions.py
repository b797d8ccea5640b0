"""Length distributions by name, to compare schedulers without a corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tdp_megatron.types import Int64Array

__all__ = ["DISTRIBUTIONS", "Lognormals", "global_batch_seqlens"]

_DRAWN_AT_ONCE = 4096
#: Draws from which the mean of a part is taken, where parts are given by their share of tokens.
_DRAWS_FOR_MEAN = 200_000


@dataclass(frozen=True, slots=True)
class Lognormals:
    """A mixture of lognormal lengths."""

    parts: tuple[tuple[float, float, float], ...]
    """(share, median in tokens, sigma) of each part."""
    by_tokens: bool = False
    """Shares are of tokens; otherwise of sequences."""

    def draw(self, rng: np.random.Generator, n: int, longest: int) -> Int64Array:
        """``n`` lengths, int64 [n], cut to ``longest`` tokens."""
        shares = np.array([share for share, _, _ in self.parts])
        if self.by_tokens:
            means = [
                np.minimum(np.random.default_rng(0).lognormal(np.log(m), sigma, _DRAWS_FOR_MEAN), longest).mean()
                for _, m, sigma in self.parts
            ]
            shares = shares / np.array(means)
        which = rng.choice(len(self.parts), size=n, p=shares / shares.sum())
        normal = rng.standard_normal(n)
        medians = np.array([m for _, m, _ in self.parts])[which]
        sigmas = np.array([sigma for _, _, sigma in self.parts])[which]
        lengths: Int64Array = np.clip(medians * np.exp(sigmas * normal), 1, longest).astype(np.int64)
        return lengths


#: GitHub files; chat for fine-tuning with rare documents; reasoning traces; long-context pretraining (ProLong).
DISTRIBUTIONS: dict[str, Lognormals] = {
    "github": Lognormals(((1.0, 1200, 1.7),)),
    "prolong": Lognormals(((0.3, 16_000, 1.0), (0.3, 95_000, 0.7), (0.4, 650, 1.15)), by_tokens=True),
    "reasoning": Lognormals(((1.0, 6000, 1.0),)),
    "sft_chat": Lognormals(((0.9989, 607, 1.0), (0.0011, 28_000, 0.75))),
}


def global_batch_seqlens(name: str, num_tokens: int, *, seed: int = 0, longest: int = 131_072) -> Int64Array:
    """Lengths of one global batch of about ``num_tokens`` tokens.

    Args:
        name: of ``DISTRIBUTIONS``.
        num_tokens: the batch ends with the sequence that reaches this.
        seed: of the draw.
        longest: lengths are cut to this, tokens.

    Returns:
        int64 [n], tokens.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"unknown distribution {name!r}; known are {', '.join(sorted(DISTRIBUTIONS))}")
    if num_tokens < 1 or longest < 1:
        raise ValueError(f"num_tokens and longest must be at least 1, got {num_tokens} and {longest}")
    rng = np.random.default_rng(seed)
    drawn: list[Int64Array] = []
    total = 0
    while total < num_tokens:
        drawn.append(DISTRIBUTIONS[name].draw(rng, _DRAWN_AT_ONCE, longest))
        total += int(drawn[-1].sum())
    lengths = np.concatenate(drawn)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
