"""Training does not depend on the layout: the same global batches give the same losses on any DP x CP."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchdata.nodes import Loader

from tdp_megatron.distributed import DpCpGroups
from tdp_megatron.indexed import IndexedDatasetBuilder
from tdp_megatron.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from data_graph import parallel_layout, training_steps
from model import GPT, GPTConfig
from options import TrainOptions, parse_options
from training import build_optimizer, train_step, warm_up

pytestmark = pytest.mark.distributed

#: Loss and gradient norm of every step, parameters after the last, numbers of microbatches seen.
Trained = tuple[list[float], list[float], list[np.ndarray], set[int]]

VOCAB_SIZE = 64
NUM_STEPS = 4


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of documents of 1 to 60 tokens, some beyond the 48 at which they are split."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(5)
    made = []
    for name in ("a", "b"):
        prefix = str(folder / name)
        with IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16) as builder:
            for length in rng.integers(1, 60, 40):
                tokens = np.minimum(rng.geometric(0.2, length), VOCAB_SIZE - 1).astype(np.uint16)
                builder.add_document(tokens, [int(length)])
            builder.finalize(prefix + ".idx")
        made.append(prefix)
    return made


def options_for(prefixes: list[str], dp: int, cp: int, reroute: str = "plan") -> TrainOptions:
    words = [word for prefix in prefixes for word in ("--data", prefix)]
    words += ["--weights", "0.6", "0.4", "--vocab-size", str(VOCAB_SIZE), "--global-batch-size", "12"]
    # One rank holds what two hold together, so that the largest sample fits every layout.
    words += ["--max-seqlen", "48", "--max-seqlen-per-rank", str(96 // cp), "--cp", str(cp), "--reroute", reroute]
    return parse_options(words, dp * cp)


def train(rank: int, world_size: int, options: TrainOptions) -> Trained:
    groups = DpCpGroups.create(parallel_layout(options), timeout_s=30.0)
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_layers=2, num_attention_heads=2))
    ddp = DistributedDataParallel(model)
    cpu = torch.device("cpu")
    warm_up(ddp, cpu)
    optimizer = build_optimizer(model, 1e-2, 0.1)
    losses, norms = [], []
    counts = set()
    steps = iter(Loader(training_steps(options, groups), restart_on_stop_iteration=False))
    for _ in range(NUM_STEPS):
        step = next(steps)
        loss_sum, norm = train_step(
            ddp, optimizer, step, num_ranks=world_size, device=torch.device("cpu"), clip_grad=1.0
        )
        torch.distributed.all_reduce(loss_sum)
        losses.append(loss_sum.item() / step.num_loss_tokens_global)
        norms.append(norm.item())
        counts |= set(step.plan.num_microbatches_per_rank.tolist())
    return losses, norms, [p.detach().numpy() for p in model.parameters()], counts


def run(options: TrainOptions) -> Trained:
    results = run_ranks(functools.partial(train, options=options), options.dp * options.cp)
    for losses, norms, parameters, _ in results[1:]:
        assert (losses, norms) == results[0][:2]
        for own, first in zip(parameters, results[0][2], strict=True):
            np.testing.assert_array_equal(own, first)
    return results[0]


@pytest.fixture(scope="module")
def one_rank(prefixes: list[str]) -> Trained:
    return run(options_for(prefixes, 1, 1))


@pytest.mark.parametrize(("dp", "cp", "reroute"), [(1, 2, "plan"), (3, 1, "plan"), (2, 2, "plan"), (2, 2, "exchange")])
def test_losses_and_parameters_equal_those_of_one_rank(
    prefixes: list[str], one_rank: Trained, dp: int, cp: int, reroute: str
) -> None:
    losses, norms, parameters, _ = one_rank
    shared_losses, shared_norms, shared_parameters, _ = run(options_for(prefixes, dp, cp, reroute))
    assert losses[-1] < losses[0]
    assert shared_losses == pytest.approx(losses, rel=1e-4)
    # Adam hides a gradient that is too large by a factor; its norm shows it.
    assert shared_norms == pytest.approx(norms, rel=1e-3)
    for shared, alone in zip(shared_parameters, parameters, strict=True):
        np.testing.assert_allclose(shared, alone, atol=2e-3)


def test_ranks_may_hold_different_numbers_of_microbatches(prefixes: list[str]) -> None:
    *_, counts = run(options_for(prefixes, 3, 1))
    assert len(counts) > 1
