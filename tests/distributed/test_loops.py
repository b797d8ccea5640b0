"""`wrap_data_iterator` and its partner over TP x PP x CP x DP, against a plain construction of the packs."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tdp_megatron.errors import ExchangeError, StateMismatchError
from tdp_megatron.loops import (
    HybridCPDataLoaderWrapper,
    PackedIterator,
    get_batch_on_this_rank_for_sequence_packing,
    packing_session,
    wrap_data_iterator,
)
from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.schedule import schedule
from tdp_megatron.testing import run_ranks
from tdp_megatron.types import ParallelLayout

pytestmark = pytest.mark.distributed

NUM_MICROBATCHES = 3
LIMIT = 64


class Grid:
    """Ranks in Megatron's order: TP fastest, then CP, DP, PP."""

    def __init__(self, world: int, tp: int, pp: int, cp: int) -> None:
        self.tp, self.pp, self.cp, self.dp = tp, pp, cp, world // (tp * pp * cp)
        self.ranks = np.arange(world).reshape(pp, self.dp, cp, tp)

    def place(self, rank: int) -> tuple[int, int, int, int]:
        pp, dp, cp, tp = np.argwhere(self.ranks == rank)[0].tolist()
        return tp, pp, dp, cp

    def collection(self, rank: int) -> SimpleNamespace:
        groups: dict[str, Any] = {}
        lists = {
            "tp": self.ranks.reshape(-1, self.tp),
            "pp": self.ranks.reshape(self.pp, -1).T,
            "cp": self.ranks.transpose(0, 1, 3, 2).reshape(-1, self.cp),
            "dp": self.ranks.transpose(0, 2, 3, 1).reshape(-1, self.dp),
            "dp_cp": self.ranks.transpose(0, 3, 1, 2).reshape(-1, self.dp * self.cp),
        }
        for name, rows in lists.items():
            for row in rows.tolist():
                group = dist.new_group(row)
                if rank in row:
                    groups[name] = group
        return SimpleNamespace(**groups)


def sample(dp: int, number: int, pad_to: int) -> dict[str, Any]:
    """A sample as Megatron's datasets make it: padded in advance, garbage at the pads."""
    rng = np.random.default_rng(1000 * dp + number)
    real = int(rng.integers(1, 40))
    padded = -(-real // pad_to) * pad_to
    return {
        "tokens": torch.from_numpy(rng.integers(1, 2**40, padded)),
        "labels": torch.from_numpy(rng.integers(1, 99, padded)),
        "loss_mask": torch.from_numpy(rng.integers(0, 2, padded).astype(np.float32)),
        "position_ids": torch.arange(padded),
        "original_seq_len": torch.tensor([real]),
        "padded_seq_len": torch.tensor([padded]),
    }


def items_of(dp: int, grid: Grid, steps: int) -> list[list[dict[str, Any]]]:
    """Microbatches of one data-parallel rank; their number of samples varies."""
    pad_to = 2 * grid.cp * grid.tp
    numbers = itertools.count()
    return [
        [sample(dp, next(numbers), pad_to) for _ in range(1 + (dp + m) % 3)] for m in range(steps * NUM_MICROBATCHES)
    ]


def expected_step(grid: Grid, step: int, steps: int, dp: int, cp: int) -> list[dict[str, Any]]:
    """The packs of one rank in plain Python."""
    everything = [
        s
        for d in range(grid.dp)
        for item in items_of(d, grid, steps)[step * NUM_MICROBATCHES : (step + 1) * NUM_MICROBATCHES]
        for s in item
    ]
    layout = ParallelLayout(grid.dp, grid.cp, LIMIT, tail_multiple=1)
    lengths = np.array([len(s["tokens"]) for s in everything])
    plan = schedule(lengths, layout, algorithm="dp_balanced", equal_count=True)
    packs = []
    for op in plan.ops:
        if op.first_rank != dp * grid.cp:
            continue
        whole: dict[str, list[Any]] = {k: [] for k in ("tokens", "labels", "loss_mask", "position_ids", "pads")}
        cu = [0]
        for i in op.sample_ids:
            real = int(everything[i]["original_seq_len"])
            pads = len(everything[i]["tokens"]) - real
            for key in ("tokens", "labels", "loss_mask"):
                whole[key] += everything[i][key][:real].tolist() + [0] * pads
            whole["position_ids"] += [*range(real), *([0] * pads)]
            whole["pads"] += [False] * real + [True] * pads
            cu.append(cu[-1] + real + pads)
        if not op.sample_ids:
            cu.append(2 * grid.cp if grid.cp > 1 else 1)
            for key in ("tokens", "labels", "loss_mask", "position_ids"):
                whole[key] += [0] * cu[-1]
            whole["pads"] += [True] * cu[-1]
        indices = cp_partition_indices(torch.tensor(cu), grid.cp, cp)
        packs.append({key: torch.tensor(values)[indices] for key, values in whole.items()} | {"cu": cu})
    return packs


CONFIG = SimpleNamespace(max_seqlen_per_dp_cp_rank=LIMIT, sequence_packing_scheduler="dp_balanced", data_timeout_s=20.0)
SHAPES = [
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (1, 1, 2),
    (2, 1, 2),
    (1, 2, 2),
    (1, 4, 1),
    (2, 2, 2),
]


def megatrons_groups(grid: Grid) -> Any:
    """What megatron-core makes; its first and last pipeline stages belong to more groups than the others."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp, pipeline_model_parallel_size=grid.pp, context_parallel_size=grid.cp
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def check_shape(world: int, shape: tuple[int, int, int], *, steps: int = 2, groups_from: str = "lists") -> None:
    grid = Grid(world, *shape)

    def body(rank: int, world: int) -> list[Any]:
        tp, pp, dp, cp = grid.place(rank)
        groups: Any
        if groups_from == "megatron":
            groups = megatrons_groups(grid)
        elif groups_from == "mesh":
            groups = DeviceMesh("cpu", torch.from_numpy(grid.ranks), mesh_dim_names=("pp", "dp", "cp", "tp"))
        else:
            groups = grid.collection(rank)
        reads = tp == 0 and pp in (0, grid.pp - 1)
        iterator = iter(items_of(dp, grid, steps)) if reads else None
        seen: list[Any] = []
        for step in range(steps):
            packed, count, total, squares = wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, groups)
            assert isinstance(packed, PackedIterator)
            batches = [get_batch_on_this_rank_for_sequence_packing(packed) for _ in range(count)]
            with pytest.raises(StopIteration):
                next(packed)
            for got, want in zip(batches, expected_step(grid, step, steps, dp, cp), strict=True):
                tokens, labels, loss_mask, attention_mask, position_ids, params, padding_mask = got
                assert attention_mask is None
                assert torch.equal(padding_mask[0], want["pads"])
                for value, key, there in (
                    (tokens, "tokens", pp == 0),
                    (position_ids, "position_ids", pp == 0),
                    (labels, "labels", pp == grid.pp - 1),
                    (loss_mask, "loss_mask", pp == grid.pp - 1),
                ):
                    assert (value is not None) == there, key
                    if value is not None:
                        assert value.shape == (1, len(want[key]))
                        assert torch.equal(value[0], want[key].to(value.dtype)), key
                assert params.qkv_format == "thd"
                assert params.cu_seqlens_q_padded.tolist() == want["cu"]
                assert params.cu_seqlens_q.dtype == torch.int32
                assert params.max_seqlen_q == max(np.diff(want["cu"]).tolist())
                assert (params.cp_group is None) == (grid.cp == 1)
                if params.cp_group is not None:
                    assert dist.get_rank(params.cp_group) == cp
            seen.append((count, total, squares))
        with pytest.raises(StopIteration):
            wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, groups)
        return seen

    results = run_ranks(body, world, timeout_s=90)
    assert all(r == results[0] for r in results)
    real = [
        int(s["original_seq_len"])
        for d in range(grid.dp)
        for item in items_of(d, grid, steps)[:NUM_MICROBATCHES]
        for s in item
    ]
    assert results[0][0][1:] == (sum(real), sum(r * r for r in real))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"tp{s[0]}pp{s[1]}cp{s[2]}")
def test_packs_on_eight_ranks(shape: tuple[int, int, int]) -> None:
    check_shape(8, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"tp{s[0]}pp{s[1]}cp{s[2]}")
def test_packs_on_sixteen_ranks(shape: tuple[int, int, int]) -> None:
    check_shape(16, shape, steps=1)


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 2)], ids=lambda s: f"tp{s[0]}pp{s[1]}cp{s[2]}")
def test_packs_from_a_device_mesh(shape: tuple[int, int, int]) -> None:
    check_shape(8, shape, groups_from="mesh")


@pytest.mark.filterwarnings("ignore")  # megatron-core warns of what is not installed
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"tp{s[0]}pp{s[1]}cp{s[2]}")
def test_packs_over_megatrons_own_groups(shape: tuple[int, int, int]) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    check_shape(8, shape, groups_from="megatron")


class Stateful:
    """A data iterator that saves and restores, and can fail."""

    def __init__(self, items: list[Any], fail_at: int = -1) -> None:
        self.items, self.at, self.fail_at = items, 0, fail_at

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == self.fail_at:
            raise OSError("disk gone")
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def tokens_of(packed: Any) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in packed]


def test_state_is_that_of_the_step_handed_out_not_of_the_one_read_ahead() -> None:
    grid = Grid(2, 1, 1, 1)

    def body(rank: int, world: int) -> None:
        groups = grid.collection(rank)
        items = items_of(rank, grid, 4)
        whole = Stateful(items)
        steps = [tokens_of(wrap_data_iterator(whole, CONFIG, NUM_MICROBATCHES, groups)[0]) for _ in range(4)]
        first = Stateful(items)
        for _ in range(2):
            packed, *_ = wrap_data_iterator(first, CONFIG, NUM_MICROBATCHES, groups)
        assert isinstance(packed, PackedIterator)
        state = packed.state_dict()
        assert state["data"] == {"at": 2 * NUM_MICROBATCHES}
        packing_session(first, CONFIG, groups).close()
        second = Stateful(items)
        packing_session(second, CONFIG, groups).load_state_dict(state)
        for step in (2, 3):
            assert tokens_of(wrap_data_iterator(second, CONFIG, NUM_MICROBATCHES, groups)[0]) == steps[step]

    run_ranks(body, 2)


def test_a_change_of_the_batch_size_loses_nothing_that_was_read_ahead() -> None:
    grid = Grid(2, 1, 1, 1)

    def body(rank: int, world: int) -> list[list[int]]:
        groups = grid.collection(rank)
        iterator = iter(items_of(rank, grid, 4))
        tokens = []
        for n in (3, 1, 4, 2):
            packed, *_ = wrap_data_iterator(iterator, CONFIG, n, groups)
            tokens += [t for batch in packed for t in batch.tokens[~batch.padding_mask].tolist()]
        return tokens

    got = sorted(t for part in run_ranks(body, 2) for t in part)
    wanted = [
        t
        for d in range(2)
        for item in items_of(d, grid, 4)[:10]
        for s in item
        for t in s["tokens"][: int(s["original_seq_len"])].tolist()
    ]
    assert got == sorted(wanted)


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1)], ids=str)
def test_a_failing_reader_is_named_on_every_rank(shape: tuple[int, int, int]) -> None:
    """The first data-parallel rank of every stage cannot read its fifth item: all ranks end with that cause."""
    grid = Grid(8, *shape)

    def body(rank: int, world: int) -> str:
        tp, pp, dp, _ = grid.place(rank)
        groups = grid.collection(rank)
        reads = tp == 0 and pp in (0, grid.pp - 1)
        iterator = Stateful(items_of(dp, grid, 3), fail_at=4 if dp == 0 else -1) if reads else None
        wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, groups)
        messages = []
        for _ in range(2):  # and again
            try:
                wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, groups)
            except ExchangeError as error:
                messages.append(str(error))
        assert len(messages) == 2
        return messages[0]

    for message in run_ranks(body, 8, timeout_s=60):
        assert "step 1: rank 0 failed: OSError: disk gone" in message


def test_data_that_ends_early_on_one_rank_is_named() -> None:
    grid = Grid(4, 1, 2, 1)

    def body(rank: int, world: int) -> str:
        _, _, dp, _ = grid.place(rank)
        groups = grid.collection(rank)
        items = items_of(dp, grid, 2)
        iterator = iter(items[:4] if dp == 1 else items)
        wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, groups)
        with pytest.raises(ExchangeError) as caught:
            wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, groups)
        return str(caught.value)

    for message in run_ranks(body, 4, timeout_s=60):
        assert "the data of rank 1 ended 2 samples short" in message


def test_virtual_pipeline_stages_and_user_keys() -> None:
    grid = Grid(4, 1, 2, 1)
    config = SimpleNamespace(
        max_seqlen_per_dp_cp_rank=LIMIT,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=2,
        token_keys=("advantage",),
    )

    def body(rank: int, world: int) -> None:
        _, pp, dp, _ = grid.place(rank)
        groups = grid.collection(rank)
        items = items_of(dp, grid, 1)
        for item in items:
            for s in item:
                n = int(s["original_seq_len"])
                s["advantage"] = torch.arange(n) + 2**30  # above what float32 holds exactly
                s["prompt"] = f"{n}"
        chunks, count, *_ = wrap_data_iterator([iter(items), None], config, NUM_MICROBATCHES, groups)
        assert isinstance(chunks, list)
        assert len(chunks) == 2
        assert count % 2 == 0
        for stage, chunk in enumerate(chunks):
            assert len(chunk) == count
            for batch in chunk.step.batches:
                real = batch.cu_seqlens.diff().tolist()
                assert [int(p) for p in batch.extras.get("prompt", ())] == real[: len(batch.sample_ids)]
                if not batch.is_dummy:
                    ids = batch.position_ids[~batch.padding_mask]
                    assert torch.equal(batch.extras["advantage"][~batch.padding_mask] - 2**30, ids)
            tokens, labels, *_ = get_batch_on_this_rank_for_sequence_packing(chunk, 2, False, stage)
            assert (tokens is not None) == (pp == 0 and stage == 0)
            assert (labels is not None) == (pp == 1 and stage == 1)
        with pytest.raises(ValueError, match="vp_stage"):
            get_batch_on_this_rank_for_sequence_packing(chunks[0], 2)

    run_ranks(body, 4)


def test_multi_token_prediction_needs_tokens_on_the_last_stage() -> None:
    grid = Grid(2, 1, 2, 1)

    def body(rank: int, world: int) -> None:
        iterator = iter(items_of(0, grid, 1))
        packed, *_ = wrap_data_iterator(iterator, CONFIG, NUM_MICROBATCHES, grid.collection(rank))
        tokens, *_ = get_batch_on_this_rank_for_sequence_packing(packed, mtp_on_this_rank=True)
        assert tokens is not None

    run_ranks(body, 2)


def test_the_last_items_make_a_smaller_batch() -> None:
    """Reading ahead has found too few items for the old batch size; the new one takes them."""
    grid = Grid(4, 2, 1, 1)

    def body(rank: int, world: int) -> list[int]:
        tp, _, dp, _ = grid.place(rank)
        groups = grid.collection(rank)
        items = iter([{"tokens": torch.full((2,), 10 * dp + i)} for i in range(6)]) if tp == 0 else None
        seen = []
        for n in (4, 2):
            packed, *_ = wrap_data_iterator(items, CONFIG, n, groups)
            seen += [t for batch in packed for t in batch.tokens[~batch.padding_mask].unique().tolist()]
        with pytest.raises(StopIteration):
            wrap_data_iterator(items, CONFIG, 2, groups)
        return seen

    ranks = run_ranks(body, 4)
    assert sorted(t for rank in ranks[::2] for t in rank) == [*range(6), *range(10, 16)]
    assert ranks[::2] == ranks[1::2]


def test_a_state_that_the_iterator_goes_on_changing() -> None:
    class Live(Stateful):
        def __init__(self, items: list[Any]) -> None:
            super().__init__(items)
            self.state = {"at": 0}

        def __next__(self) -> Any:
            item = super().__next__()
            self.state["at"] = self.at
            return item

        def state_dict(self) -> dict[str, int]:
            return self.state

    def body(rank: int, world: int) -> None:
        iterator = Live([{"tokens": torch.arange(3)}] * 20)
        for step in range(1, 5):
            packed, *_ = wrap_data_iterator(iterator, CONFIG, 2)
            assert packed.state_dict()["data"] == {"at": 2 * step}

    run_ranks(body, 1)


@pytest.mark.parametrize("state", [None, {}, {"version": 2}, {"version": 1}, {"version": 1, "step": -1}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    def body(rank: int, world: int) -> None:
        for adapter in (packing_session(iter([]), CONFIG), HybridCPDataLoaderWrapper(iter([]), CONFIG)):
            with pytest.raises(StateMismatchError, match="saved state"):
                adapter.load_state_dict(state)

    run_ranks(body, 1)


S = 8
ITEMS: dict[str, tuple[Any, list[list[int]]]] = {
    "packed": ({"tokens": torch.arange(S), "cu_seqlens": torch.tensor([0, 3, 3, S])}, [[0, 1, 2], [3, 4, 5, 6, 7]]),
    "packed, padded": ({"tokens": torch.arange(S), "cu_seqlens": torch.tensor([0, 3, 6])}, [[0, 1, 2], [3, 4, 5]]),
    "packed batch of one": (
        {
            "tokens": torch.arange(S)[None],
            "labels": torch.arange(S)[None] + 1,
            "loss_mask": torch.ones(1, S),
            "position_ids": torch.arange(S)[None],
            "cu_seqlens": torch.tensor([[0, 3, S]], dtype=torch.int32),
        },
        [[0, 1, 2], [3, 4, 5, 6, 7]],
    ),
    "not packed after all": ({"tokens": torch.arange(S), "cu_seqlens": None, "max_seqlen": None}, [[*range(S)]]),
    "rows": ({"tokens": torch.arange(S).reshape(2, 4), "attention_mask": None}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "lists": ([{"tokens": [1, 2]}, {"tokens": np.array([3], dtype=np.uint8)}], [[1, 2], [3]]),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_kinds_of_items(kind: str) -> None:
    item, wanted = ITEMS[kind]

    def body(rank: int, world: int) -> None:
        config = SimpleNamespace(max_seqlen_per_dp_cp_rank=LIMIT)
        packed, _, total, squares = wrap_data_iterator(iter([item]), config, 1)
        found = []
        for batch in packed:
            edges = batch.cu_seqlens.tolist()
            found += [batch.tokens[a:b].tolist() for a, b in itertools.pairwise(edges[: len(batch.sample_ids) + 1])]
            assert not set(batch.extras) & {"cu_seqlens", "max_seqlen", "attention_mask"}
        assert sorted(found) == wanted
        assert (total, squares) == (sum(map(len, wanted)), sum(len(w) ** 2 for w in wanted))

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64), "epoch": 3}, "key 'epoch' has 0 rows, tokens have 2"),
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64), "epoch": torch.tensor(3)}, "key 'epoch' has 0 rows"),
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64), "mask": torch.ones(1, 1, 4, 4)}, "'mask' has 1 rows"),
        ({"tokens": torch.arange(S), "cu_seqlens": torch.tensor([0, 9])}, "do not describe 8 tokens"),
        ({"tokens": torch.arange(S), "cu_seqlens": torch.tensor([0, 5, 3])}, "do not describe 8 tokens"),
        ({"tokens": torch.arange(S), "cu_seqlens": torch.tensor([1, 8])}, "do not describe 8 tokens"),
        ({"input_ids": torch.arange(S)}, "needs the key 'tokens'; it has .'input_ids'"),
        ((torch.arange(S), torch.arange(S)), "must yield mappings or lists of mappings, got Tensor"),
        (None, "got NoneType"),
    ],
)
def test_items_that_are_no_samples(item: Any, message: str) -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(ExchangeError, match=message):
            wrap_data_iterator(iter([item]), SimpleNamespace(max_seqlen_per_dp_cp_rank=LIMIT), 1)

    run_ranks(body, 1)


def test_without_groups_all_ranks_are_data_parallel() -> None:
    grid = Grid(2, 1, 1, 1)

    def body(rank: int, world: int) -> list[int]:
        items = [s for item in items_of(rank, grid, 1) for s in item]
        rows = [{"tokens": torch.arange(5).repeat(2, 1) + 100 * rank}]  # a batch of two rows
        packed, *_ = wrap_data_iterator(iter([items, rows]), CONFIG, 2)
        return [t for batch in packed for t in batch.tokens[~batch.padding_mask].tolist()]

    tokens = [t for part in run_ranks(body, 2) for t in part]
    assert all(tokens.count(100 * r + i) >= 2 for r in range(2) for i in range(5))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("groups_made", ["once", "every step"])
def test_validation_between_training_steps(shape: tuple[int, int, int], groups_made: str) -> None:
    """Two iterators take turns; ranks that read none, and loops that describe their groups anew, follow."""
    tp, pp, cp = shape
    world = 2 * tp * pp * cp if tp * pp < 4 else 4
    grid = Grid(world, tp, pp, cp)

    def body(rank: int, world: int) -> list[list[int]]:
        groups = grid.collection(rank)
        mine_tp, mine_pp, dp, _ = grid.place(rank)
        reads = mine_tp == 0 and mine_pp in (0, grid.pp - 1)
        train, valid = (
            iter([{"tokens": torch.full((3,), base + 10 * dp + i)} for i in range(9)]) if reads else None
            for base in (100, 500)
        )
        seen = []
        for iterator in (train, train, valid, train, valid, valid):
            again = groups if groups_made == "once" else SimpleNamespace(**vars(groups))
            packed, *_ = wrap_data_iterator(iterator, CONFIG, 1, again)
            ids = sorted(ref for batch in packed for ref in batch.refs)
            tokens = [t for batch in packed.step.batches for t in batch.tokens[~batch.padding_mask].unique().tolist()]
            seen.append(tokens if packed.step.has_tokens else [-len(ids)])
        return seen

    ranks = run_ranks(body, world)
    wanted = [100, 101, 500, 102, 501, 502]
    for step, first in enumerate(wanted):
        found = sorted({t for rank in ranks for t in rank[step] if t >= 0})
        assert found == [first + 10 * d for d in range(grid.dp)], (step, found)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 2, 1), (1, 4, 1)], ids=str)
def test_stages_that_read_different_iterators_are_told(shape: tuple[int, int, int]) -> None:
    tp, pp, cp = shape
    grid = Grid(tp * pp * cp, tp, pp, cp)

    def body(rank: int, world: int) -> str:
        groups = grid.collection(rank)
        mine_tp, mine_pp, _, _ = grid.place(rank)
        reads = mine_tp == 0 and mine_pp in (0, grid.pp - 1)
        train, valid = (iter([{"tokens": torch.arange(3)}] * 9) if reads else None for _ in range(2))
        for iterator in (train, valid):
            wrap_data_iterator(iterator, CONFIG, 1, groups)
        with pytest.raises(ValueError, match="reads data iterator") as caught:
            wrap_data_iterator(train if mine_pp == 0 else valid, CONFIG, 1, groups)
        packed, *_ = wrap_data_iterator(valid, CONFIG, 1, groups)  # and they can go on
        assert len(packed.step.batches) == 1
        return str(caught.value)

    messages = run_ranks(body, grid.tp * grid.pp)
    assert set(messages) == {
        "the last pipeline stage reads data iterator 1, the first one 0 (counted as they were first used); give both "
        "the same"
    }


def test_a_restored_state_is_not_the_iterators_to_change() -> None:
    class Adopting(Stateful):
        def __init__(self, items: list[Any]) -> None:
            super().__init__(items)
            self.state = {"at": 0}

        def __next__(self) -> Any:
            self.at = self.state["at"]
            item = super().__next__()
            self.state["at"] = self.at
            return item

        def state_dict(self) -> dict[str, int]:
            return self.state

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state

    def body(rank: int, world: int) -> None:
        items = [{"tokens": torch.full((2,), i)} for i in range(12)]
        first = Adopting(items)
        packed, *_ = wrap_data_iterator(first, CONFIG, 2)
        state = packed.state_dict()
        second = Adopting(items)
        session = packing_session(second, CONFIG)
        session.load_state_dict(state)
        for step in (1, 2):
            packed, *_ = wrap_data_iterator(second, CONFIG, 2)
            assert packed.step.batches[0].tokens[0] == 2 * step
        assert state["data"] == {"at": 2}

    run_ranks(body, 1)


def test_closed_sessions_let_go_of_their_iterators() -> None:
    """Otherwise the workers of every validation's DataLoader would live as long as the training."""
    grid = Grid(2, 2, 1, 1)

    def body(rank: int, world: int) -> None:
        groups = grid.collection(rank)
        seen = []
        for validation in range(3):
            iterator = Stateful([{"tokens": torch.full((2,), 10 * validation + i)} for i in range(5)])
            for _ in range(2):
                packed, *_ = wrap_data_iterator(iterator if rank == 0 else None, CONFIG, 1, groups)
                seen += packed.step.batches[0].tokens[:1].tolist()
            packed.session.close()
            assert packed.state_dict()["step"] == 2
            if rank == 0:
                assert packed.state_dict()["data"] == {"at": 2}
            with pytest.raises(RuntimeError, match="session was closed"):
                wrap_data_iterator(iterator if rank == 0 else None, CONFIG, 1, groups)
            with pytest.raises(RuntimeError, match="session was closed"):
                packed.load_state_dict(packed.state_dict())
            alive = weakref.ref(iterator)
            del iterator
            gc.collect()
            assert alive() is None
        assert seen == [0, 1, 10, 11, 20, 21]

    run_ranks(body, 2)


def test_a_reader_without_data_is_told_to_its_receivers() -> None:
    grid = Grid(2, 2, 1, 1)

    def body(rank: int, world: int) -> list[str]:
        groups = grid.collection(rank)
        messages = []
        for source in (None, [{"tokens": torch.arange(3)}]):
            with pytest.raises((TypeError, ValueError, ExchangeError)) as caught:
                wrap_data_iterator(source if rank == 0 else None, CONFIG, 1, groups)
            messages.append(f"{type(caught.value).__name__}: {caught.value}")
        packed, *_ = wrap_data_iterator(iter([{"tokens": torch.arange(3)}]) if rank == 0 else None, CONFIG, 1, groups)
        assert len(packed) == 1
        return messages

    reader, receiver = run_ranks(body, 2)
    assert reader[0].startswith("ValueError: TP rank 0 of pipeline stage 0 reads data")
    assert reader[1].startswith("TypeError: data_iterator must be an iterator, got dict")
    assert all(message.startswith("ExchangeError: the rank that reads the data") for message in receiver)


def test_what_is_iterable_but_no_iterator_is_refused() -> None:
    def body(rank: int, world: int) -> None:
        loader = torch.utils.data.DataLoader([{"tokens": torch.arange(3)}], collate_fn=list)
        with pytest.raises(TypeError, match=r"must be an iterator, got DataLoader; give iter\(\) of it"):
            wrap_data_iterator(loader, CONFIG, 1)
        packed, *_ = wrap_data_iterator(iter(loader), CONFIG, 1)
        assert tokens_of(packed) == [[0, 1, 2]]

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("config", "number", "message"),
    [
        (SimpleNamespace(), 1, "max_seqlen_per_dp_cp_rank must be"),
        (SimpleNamespace(max_seqlen_per_dp_cp_rank=0), 1, "must be a positive number"),
        (SimpleNamespace(max_seqlen_per_dp_cp_rank=8), 0, "num_microbatches must be"),
    ],
)
def test_bad_arguments(config: Any, number: int, message: str) -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(ValueError, match=message):
            wrap_data_iterator(iter([]), config, number)

    run_ranks(body, 1)
