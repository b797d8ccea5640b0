"""What went wrong for users of other libraries on resume, over ranks and in packs, with the value it must have here."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import scaled_dot_product_attention
from torchdata.nodes import IterableWrapper

from tdp_megatron.errors import ScheduleError
from tdp_megatron.nodes import Batch, Blend, DocumentSample, IndexedRead, Loader, Pack, Prefetch, Reroute, Shard
from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.schedule import CostModel, StreamScheduler, schedule
from tdp_megatron.testing import check_resume_at_every_step, run_ranks, write_corpus
from tdp_megatron.types import IGNORE_LABEL, PackedBatch, ParallelLayout, Step

ONE_RANK = ParallelLayout(1, 1, 64, tail_multiple=1)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 documents of 4 to 20 tokens; every token names its document."""
    lengths = np.random.default_rng(0).integers(4, 21, 40)
    return write_corpus(tmp_path_factory.mktemp("cases") / "d", [[i] * n for i, n in enumerate(lengths)])


def documents(prefix: str, **options: Any) -> DocumentSample:
    return DocumentSample(IndexedRead(prefix), max_seqlen=32, **options)


def packs(prefix: str, layout: ParallelLayout = ONE_RANK, rank: int = 0, **options: Any) -> Reroute:
    arguments: dict[str, Any] = {"global_batch_size": 3, **options}
    return Reroute(Pack(documents(prefix), layout, **arguments), rank=rank)


def content(step: Step) -> list[Any]:
    return [step.index, [[b.tokens, b.labels, b.cu_seqlens, list(b.refs)] for b in step]]


def only_pack(step: Step) -> PackedBatch:
    (batch,) = step.batches
    return batch


# Resume


@pytest.mark.parametrize("read_ahead", [0, 2, 8])
def test_position_counts_samples_not_packs(prefix: str, read_ahead: int) -> None:
    """llm-foundry 1277: three documents to a pack, stopped after 5 batches; the sixth is an unstopped run's."""

    def loader() -> Loader[Step]:
        node = packs(prefix)
        return Loader(Prefetch(node, depth=read_ahead) if read_ahead else node)

    whole = [only_pack(step).refs for step in loader()]
    assert {len(refs) for refs in whole} == {3}
    first = loader()
    seen = [only_pack(step).refs for _, step in zip(range(5), first, strict=False)]
    second = loader()
    second.load_state_dict(first.state_dict())
    rest = [only_pack(step).refs for step in second]
    assert rest[0] == whole[5]
    assert seen + rest == whole
    samples = [ref for refs in whole for ref in refs]
    assert len(set(samples)) == len(samples) == 39  # none twice


def test_a_state_of_the_end_of_an_epoch_begins_the_next_one(prefix: str) -> None:
    """Streaming 700, torchdata 1437."""
    node = documents(prefix, num_epochs=None)
    epoch = node.take(40).refs.tolist()
    fresh = documents(prefix, num_epochs=None)
    fresh.reset(node.state_dict())
    following = fresh.take(40).refs.tolist()
    assert sorted(following) == sorted(epoch)
    assert following != epoch
    assert following == node.take(40).refs.tolist()


@pytest.mark.parametrize("read_ahead", [0, 4])
def test_a_loader_saved_at_the_end_ends_at_once_and_then_begins_anew(prefix: str, read_ahead: int) -> None:
    def loader() -> Loader[Step]:
        return Loader(Prefetch(packs(prefix), depth=read_ahead) if read_ahead else packs(prefix))

    first = loader()
    whole = [only_pack(step).refs for step in first]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert list(second) == []
    assert [only_pack(step).refs for step in second] == whole


def test_what_was_read_ahead_is_not_lost(prefix: str) -> None:
    """torchdata 1520: eight items ready, saved after five; the sixth comes next."""
    whole = [s.ref for s in documents(prefix)]
    node = Prefetch(documents(prefix), depth=8)
    assert [next(node).ref for _ in range(5)] == whole[:5]
    state = node.state_dict()
    node.shutdown()
    fresh = Prefetch(documents(prefix), depth=8)
    fresh.reset(state)
    assert [s.ref for s in fresh] == whole[5:]


@pytest.mark.distributed
def test_ranks_at_unequal_positions_save_one_state(prefix: str, tmp_path: Path) -> None:
    """prime-rl 1035: rank 1 has read far ahead of rank 0; both go on after the step both have trained on."""
    layout = ParallelLayout(2, 1, 64)

    def loader(rank: int) -> Loader[Step]:
        return Loader(Prefetch(packs(prefix, layout, rank, global_batch_size=4), depth=1 + 6 * rank))

    def save(rank: int, world: int) -> list[Any]:
        mine = loader(rank)
        steps = iter(mine)
        for _ in range(2):
            next(steps)
        dcp.save({"data": mine}, checkpoint_id=tmp_path / "checkpoint")
        return [sorted(ref for batch in step for ref in batch.refs) for step in steps]

    def load(rank: int, world: int) -> list[Any]:
        mine = loader(1 - rank)
        dcp.load({"data": mine}, checkpoint_id=tmp_path / "checkpoint")
        return [sorted(ref for batch in step for ref in batch.refs) for step in mine]

    saved = run_ranks(save, 2)
    assert len(saved[0]) == 8
    assert run_ranks(load, 2) == saved[::-1]


def test_the_end_of_the_data_makes_a_smaller_pack(tmp_path: Path) -> None:
    """Energon 114: 7 documents, 4 to a batch; the rest is not lost, and every point can be restored."""
    prefix = write_corpus(tmp_path / "seven", [[i] * (3 + i) for i in range(7)])

    def make() -> Reroute:
        return packs(prefix, drop_last=False, global_batch_size=4)

    steps = [only_pack(step) for step in make()]
    assert [len(pack.refs) for pack in steps] == [4, 3]
    assert sorted(ref for pack in steps for ref in pack.refs) == [(0, i) for i in range(7)]
    assert check_resume_at_every_step(make, describe=content) == 2


@pytest.mark.parametrize("stop", range(8))
def test_the_end_of_a_stream_empties_its_buffer(stop: int) -> None:
    """Energon 114 with samples that arrive one by one and a buffer of 4; saved and restored after any of them."""
    cost = CostModel(a=1e-5, b=1e-9)
    lengths = [30, 4, 17, 9, 60, 5, 8]

    def scheduler() -> StreamScheduler:
        return StreamScheduler(ONE_RANK, cost, window=4)

    def numbers(waves: list[Any]) -> list[int]:
        return [int(n) for wave in waves for n in wave.sample_numbers]

    whole = scheduler()
    expected = numbers([w for s in lengths if (w := whole.add(s)) is not None] + whole.flush())
    first, second = scheduler(), scheduler()
    seen = [w for s in lengths[:stop] if (w := first.add(s)) is not None]
    second.load_state_dict(first.state_dict())
    seen += [w for s in lengths[stop:] if (w := second.add(s)) is not None] + second.flush()
    assert numbers(seen) == expected
    assert sorted(expected) == list(range(7))


# Ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_share_the_files_out(prefix: str, tmp_path: Path, num_ranks: int) -> None:
    """TinyLlama 67: together the ranks read everything, and no two the same. Different seeds are an error, see
    test_ranks_with_different_seeds_are_an_error."""
    other = write_corpus(tmp_path / "other", [[9] * 5] * 23)
    parts: list[set[Any]] = []
    for rank in range(num_ranks):
        blend = Blend([documents(prefix), documents(other)], "by_size", stop="all_exhausted")
        parts.append({s.ref for s in Shard(blend, rank=rank, num_ranks=num_ranks)})
    assert set.union(*parts) == {(0, i) for i in range(40)} | {(1, i) for i in range(23)}
    assert sum(len(part) for part in parts) == 63
    assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_sizes(prefix: str) -> None:
    """With packing and an exchange: test_batch_that_does_not_divide_names_the_nearest_sizes. By plan any size does."""
    with pytest.raises(ValueError, match="nearest valid: 8 and 16"):
        Batch(documents(prefix), micro_batch_size=2, dp_size=4, global_batch_size=12, sequence_length=32)
    layout = ParallelLayout(3, 1, 64)
    for rank in range(3):
        step = next(packs(prefix, layout, rank, global_batch_size=7))
        assert step.num_samples_global == 7
        assert step.num_microbatches >= 1


# Packing


def test_real_end_of_document_tokens_keep_their_loss(tmp_path: Path) -> None:
    """Bridge 4660: [5,6,0,7,0] with pad = eos = 0, padded to 8: masked by position, not by value."""
    prefix = write_corpus(tmp_path / "d", [[5, 6, 0, 7, 0]])
    layout = ParallelLayout(1, 1, 8, tail_multiple=8)
    pack = only_pack(next(packs(prefix, layout, global_batch_size=1)))
    assert pack.tokens.tolist() == [5, 6, 0, 7, 0, 0, 0, 0]
    assert pack.labels.tolist() == [6, 0, 7, 0] + [IGNORE_LABEL] * 4
    assert pack.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert pack.padding_mask.tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize(("lengths", "cp", "padded"), [([4, 3], 2, [4, 4]), ([698], 4, [704])])
def test_no_token_is_lost_to_context_parallelism(
    tmp_path: Path, lengths: list[int], cp: int, padded: list[int]
) -> None:
    """Transformer Engine 1930: the last tokens of a length that 2 x CP does not divide."""
    prefix = write_corpus(tmp_path / "d", [np.arange(n) + 1000 * i for i, n in enumerate(lengths)])
    source = DocumentSample(IndexedRead(prefix), max_seqlen=1024, shuffle=False)
    layout = ParallelLayout(1, cp, 1024, tail_multiple=2)
    slices = [
        only_pack(next(Reroute(Pack(source, layout, global_batch_size=len(lengths)), rank=rank))) for rank in range(cp)
    ]
    cu, cu_padded = slices[0].cu_seqlens.tolist(), slices[0].cu_seqlens_padded.tolist()
    n = len(lengths)
    assert np.diff(cu)[:n].tolist() == [lengths[i] for _, i in slices[0].refs]
    assert np.diff(cu_padded)[:n].tolist() == [padded[i] for _, i in slices[0].refs]
    tokens = sorted(t for part in slices for t in part.tokens[~part.padding_mask].tolist())
    assert tokens == sorted(t for i, size in enumerate(lengths) for t in range(1000 * i, 1000 * i + size))
    assert sum(int(part.loss_mask.sum()) for part in slices) == sum(size - 1 for size in lengths)


def test_repeated_ends_are_empty_sequences() -> None:
    cu = torch.tensor([0, 16, 40, 40, 40], dtype=torch.int32)
    both = [cp_partition_indices(cu, 2, rank).tolist() for rank in range(2)]
    assert both[0] == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 34, 35, 36, 37, 38, 39]
    assert sorted(both[0] + both[1]) == list(range(40))


def test_another_cp_size_is_another_plan(prefix: str) -> None:
    """Bridge 1867: nothing packed for one CP size is used with another. Packs are not stored; the state is for all."""
    lengths = np.array([7, 12, 5])
    one, two = (schedule(lengths, ParallelLayout(1, cp, 64), algorithm="lpt") for cp in (1, 2))
    assert one.digest() != two.digest()
    assert one.padded_lengths.tolist() != two.padded_lengths.tolist()
    node = packs(prefix)
    next(node)
    resumed = packs(prefix, ParallelLayout(1, 2, 64))
    resumed.reset(node.state_dict())
    pack = only_pack(next(resumed))
    assert pack.local_cp_size == 2
    assert all(n % 4 == 0 for n in pack.cu_seqlens_padded.diff().tolist())
    assert sorted(pack.refs) == sorted(only_pack(next(node)).refs)


def test_documents_in_one_pack_do_not_see_each_other(tmp_path: Path) -> None:
    """nanoVLM 204: documents of 3 and 2 tokens."""

    def attended(first_document: list[int]) -> tuple[PackedBatch, torch.Tensor]:
        prefix = write_corpus(tmp_path / f"d{first_document[0]}", [first_document, [4, 5]])
        source = DocumentSample(IndexedRead(prefix), max_seqlen=8, shuffle=False)
        plan_in_order = Pack(source, ONE_RANK, global_batch_size=2, algorithm="lpt")
        pack = only_pack(next(Reroute(plan_in_order)))
        table = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
        hidden = table[pack.tokens][None]
        same = pack.document_id[:, None] == pack.document_id[None, :]
        causal = pack.position_ids[:, None] >= pack.position_ids[None, :]
        return pack, scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=same & causal)[0]

    pack, out = attended([1, 2, 3])
    assert pack.refs == ((0, 0), (0, 1))
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert pack.cu_seqlens.tolist() == [0, 3, 5]
    assert pack.document_id.tolist() == [0, 0, 0, 1, 1]
    assert pack.loss_mask.tolist() == [1, 1, 0, 1, 0]  # no document predicts the next one
    _, other = attended([7, 8, 9])
    assert torch.equal(out[3:], other[3:])
    assert not torch.equal(out[:3], other[:3])


@pytest.mark.parametrize(
    ("overflow", "lengths", "dropped"),
    [("split", [10, 3, 10, 1], 0), ("truncate", [10, 10], 4), ("drop", [], 24)],
)
def test_samples_above_the_cap_have_a_policy(tmp_path: Path, overflow: Any, lengths: list[int], dropped: int) -> None:
    """trl 5075: 13 and 11 tokens with a cap of 10."""
    prefix = write_corpus(tmp_path / "d", [[1] * 13, [2] * 11])
    source = DocumentSample(IndexedRead(prefix), max_seqlen=10, overflow=overflow, shuffle=False)
    if lengths:
        assert [s.seqlen for s in source] == lengths
    else:
        with pytest.raises(ValueError, match=r"2 documents give no sample \(0 empty, 2 longer than 10\)"):
            source.reset(None)
        return
    assert (source.table.num_overlong, source.table.num_dropped_tokens) == (2, dropped)


def test_without_a_policy_a_sample_above_the_cap_is_an_error(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "d", [[1] * 13, [2] * 11])
    with pytest.raises(ValueError, match="document 0 has 13 tokens"):
        next(DocumentSample(IndexedRead(prefix), max_seqlen=10, overflow="error"))
    source = DocumentSample(IndexedRead(prefix), max_seqlen=20)
    with pytest.raises(ScheduleError, match=r"(?s)13.*10|10.*13"):
        next(Pack(source, ParallelLayout(1, 1, 10, tail_multiple=1), global_batch_size=2))


def test_pads_are_defined_whatever_was_in_memory_before() -> None:
    """Bridge 3117: NaN at pads times mask 0 is NaN. The memory of packs is used again; first it is filled with NaN."""
    layout = ParallelLayout(1, 2, 32_768)

    def sample(size: int, value: float) -> dict[str, Any]:
        return {"tokens": torch.full((size,), 7), "weight": torch.full((size, 2), value), "loss_mask": torch.ones(size)}

    items = [sample(size, float("nan") if size == 40_000 else 1.0) for size in (40_000, 39_001, 40_000, 33_333)]
    node = Reroute(Pack(IterableWrapper(items), layout, global_batch_size=1, token_keys=["weight"]), pad_id=3)
    for number, step in enumerate(node):
        pack = only_pack(step)
        pads = pack.padding_mask
        assert pads.any() == (number % 2 == 1)
        if number % 2:
            assert pack.tokens[pads].unique().tolist() == [3]
            assert pack.labels[pads].unique().tolist() == [IGNORE_LABEL]
            assert not pack.loss_mask[pads].any()
            assert not pack.extras["weight"][pads].any()
            assert torch.isfinite((pack.extras["weight"].sum(dim=1) * pack.loss_mask).sum())
        del step, pack, pads
        gc.collect()
