"""The graph of nodes that feeds training: documents, blended, packed, rerouted, read ahead."""

from __future__ import annotations

from torchdata.nodes import BaseNode

from options import TrainOptions
from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Pack, Prefetch, Reroute, SampleSource, Shard
from tdp_megatron.schedule import CostModel
from tdp_megatron.types import ParallelLayout, Step

__all__ = ["blended_documents", "cost_model", "parallel_layout", "training_steps"]


def parallel_layout(options: TrainOptions) -> ParallelLayout:
    """How the ranks share a global batch."""
    return ParallelLayout(dp=options.dp, cp=options.cp, max_seqlen_per_dp_cp_rank=options.max_seqlen_per_rank)


def cost_model(options: TrainOptions) -> CostModel:
    """Work of the example GPT: 6 FLOP per token and parameter, and attention, which grows with the square.

    The scheduler compares costs with each other, so that the speed assumed here matters little.
    """
    flops_per_second = 3e10
    parameters = 12 * options.num_layers * options.hidden_size**2 + options.vocab_size * options.hidden_size
    return CostModel(
        a=6 * parameters / flops_per_second,
        b=6 * options.num_layers * options.hidden_size / flops_per_second,
    )


def blended_documents(options: TrainOptions) -> SampleSource:
    """Samples in their global order, which depends on no rank and no layout."""
    return Blend(
        [
            DocumentSample(
                IndexedRead(prefix, vocab_size=options.vocab_size),
                max_seqlen=options.max_seqlen,
                overflow="split",
                num_epochs=None,
                shuffle=True,
                seed=options.seed,
            )
            for prefix in options.data
        ],
        weights=list(options.weights),
    )


def training_steps(options: TrainOptions, groups: DpCpGroups) -> BaseNode[Step]:
    """This rank's share of every global batch.

    With ``--reroute plan`` every rank walks the global order and reads only the tokens it will train on. With
    ``exchange`` each rank reads the samples dealt to it and an all-to-all carries them to where they are needed.

    Raises:
        ValueError: The weights, lengths or sizes are impossible.
    """
    layout = parallel_layout(options)
    samples = blended_documents(options)
    exchange = None
    if options.reroute == "exchange":
        samples = Shard(samples, rank=groups.rank, num_ranks=layout.num_ranks)
        exchange = Exchange(groups)
    packed = Pack(
        samples,
        layout,
        global_batch_size=options.global_batch_size,
        algorithm=options.algorithm,
        cost=cost_model(options),
        exchange=exchange,
    )
    return Prefetch(Reroute(packed, groups=groups, agree_every=100), depth=options.prefetch)
