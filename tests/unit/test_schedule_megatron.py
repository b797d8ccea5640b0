"""The scheduler classes with Megatron's method names."""

from __future__ import annotations

import numpy as np
import pytest

from tdp_megatron.errors import ScheduleError
from tdp_megatron.schedule.megatron import BalancedCPScheduler, DefaultDynamicCPScheduler, DpBalancedScheduler


def test_dp_balanced_returns_ids_by_microbatch_and_rank():
    # Two CP ranks share each pack of at most 2 * 16 tokens; ids are the caller's.
    scheduler = DpBalancedScheduler(16, cp_size=2, dp_size=2)
    groups = scheduler.get_groups_and_subsamples([(70, 16), (71, 16), (80, 32), (81, 8), (82, 4)])
    assert groups == [[[70, 71], [70, 71], [80], [80]], [[81], [81], [82], [82]]]


def test_virtual_pipeline_groups():
    scheduler = DpBalancedScheduler(16, cp_size=1, dp_size=2, microbatch_group_size_per_vp_stage=2)
    groups = scheduler.get_groups_and_subsamples([(i, 4) for i in range(8)])
    assert len(groups) == 2
    assert sorted(i for microbatch in groups for ids in microbatch for i in ids) == list(range(8))


def test_dynamic_cp_gives_a_long_sample_to_more_ranks():
    scheduler = DefaultDynamicCPScheduler(16, cp_size=1, dp_size=4)
    groups = scheduler.get_groups_and_subsamples([(5, 64), (6, 16), (7, 16)])
    assert groups[0] == [[5]] * 4
    assert sorted(i for ids in groups[1] for i in set(ids)) == [6, 6, 7, 7]


def test_dynamic_cp_places_as_megatron_does():
    """By hand: the oldest group that stays below the busiest, then the narrowest widened, oldest first."""
    samples = list(enumerate([128, 96, 64, 48, 32, 24, 16, 8]))
    scheduler = DefaultDynamicCPScheduler(64, cp_size=2, dp_size=2)
    first = [[0], [0], [1, 4], [1, 4]]
    assert scheduler.get_groups_and_subsamples(samples) == [first, [[2], [2], [3, 6], [5, 7]]]
    # The last one is halved, and both halves take all ranks.
    scheduler = DefaultDynamicCPScheduler(64, 2, 2, microbatch_group_size_per_vp_stage=3)
    assert scheduler.get_groups_and_subsamples(samples) == [first, [[3, 6], [3, 6], [5, 7], [5, 7]], [[2]] * 4]


def test_dynamic_cp_lets_a_group_work_longer_than_the_tallest_sample_up_to_the_cap():
    # The tallest works 200 on each of two ranks, the two after it 128 + 98; the most would be 1.05 * 20 * 16.
    scheduler = DefaultDynamicCPScheduler(16, cp_size=1, dp_size=4)
    groups = scheduler.get_groups_and_subsamples([(0, 20), (1, 16), (2, 14), (3, 4), (4, 4), (5, 2)])
    assert groups == [[[0, 3, 4, 5]] * 2 + [[1, 2]] * 2]


def test_a_sample_above_the_cap_is_named():
    with pytest.raises(ScheduleError, match="sequence 0 has 17 tokens, the limit is 16"):
        DpBalancedScheduler(16, cp_size=1, dp_size=2).get_groups_and_subsamples([(9, 17)])


def test_required_keys():
    scheduler = DpBalancedScheduler(16, cp_size=1, dp_size=2)
    sample = dict.fromkeys(scheduler.get_required_sample_keys())
    assert scheduler.check_require_sample_keys([sample])
    assert not scheduler.check_require_sample_keys([sample, {"tokens": None}])


def test_arguments_are_those_of_megatron():
    # Names and order as in megatron/core/datasets/data_schedule.py, which calls them by position and by name.
    scheduler = DpBalancedScheduler(16, 2, 2, None, max_num_seqs=2)
    assert scheduler.max_seq_len_all_ranks == 32
    assert not scheduler.is_dynamic_cp
    groups = scheduler.get_groups_and_subsamples([(i, 4) for i in range(8)])
    assert max(len(ids) for microbatch in groups for ids in microbatch) == 2
    dynamic = DefaultDynamicCPScheduler(16, 1, 4, None, max_num_seqs=None, min_cp_size=2)
    assert dynamic.is_dynamic_cp
    assert (dynamic.max_seq_len_per_rank, dynamic.total_hdp_gpus) == (16, 4)
    assert isinstance(dynamic, DpBalancedScheduler)
    groups = dynamic.get_groups_and_subsamples([(5, 4), (6, 4)])
    assert all(microbatch[0] == microbatch[1] and microbatch[2] == microbatch[3] for microbatch in groups)
    assert list(scheduler.get_required_sample_keys()) == [
        "tokens",
        "labels",
        "loss_mask",
        "position_ids",
        "original_seq_len",
        "padded_seq_len",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_cp_size": 8}, "min_cp_size is 8, and no power of two of at least that divides the 4 ranks"),
        ({"max_num_seqs": 0}, "max_num_seqs must be None or at least 1, got 0"),
        ({"microbatch_group_size_per_vp_stage": -1}, "microbatch_group_size_per_vp_stage must be None or at least 1"),
    ],
)
def test_arguments_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        DefaultDynamicCPScheduler(16, 1, 4, **options)


class FourRanks:
    def size(self):
        return 4


@pytest.mark.parametrize("group", [FourRanks(), 4])
def test_hybrid_cp_returns_lengths_and_ids(group):
    scheduler = BalancedCPScheduler(16, group)
    groups, ids = scheduler.get_groups_and_subsamples([(7, 10), (8, 40), (9, 12)], config=None)
    assert groups == [[[40]] * 4, [[12], [12], [10], [10]]]
    assert ids == [[[8]] * 4, [[9], [9], [7], [7]]]
    with pytest.raises(ScheduleError, match="needs 8 ranks of 16, there are 4"):
        scheduler.get_groups_and_subsamples([(0, 65)], None)


def test_hybrid_cp_work_of_int32_lengths_does_not_overflow():
    lengths = np.array([70_000, 60_000, 50_000, 40_000], dtype=np.int32)
    scheduler = BalancedCPScheduler(100_000, 2)
    assert (
        scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)[1]
        == (scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)[1])
    )


def test_hybrid_cp_moves_blocks_onto_process_groups_and_strict_names_them():
    # Megatron puts the 8 ranks of the first sample behind the 4 of the second.
    samples = list(enumerate([25, 536, 389, 799, 277]))
    _, ids = BalancedCPScheduler(128, 12).get_groups_and_subsamples(samples, None)
    assert ids[1] == [[1]] * 8 + [[0]] * 4
    with pytest.raises(ScheduleError, match="group 1 puts sample 1 on ranks 4 to 11, which are no process group"):
        BalancedCPScheduler(128, 12, strict=True).get_groups_and_subsamples(samples, None)


def test_hybrid_cp_refuses_ranks_that_no_sample_can_use():
    with pytest.raises(ScheduleError, match="2 of 10 have nothing to do"):
        BalancedCPScheduler(100, 10).get_groups_and_subsamples([(0, 112), (1, 112)], None)
    with pytest.raises(ScheduleError, match="sequence 1 has 0 tokens"):
        BalancedCPScheduler(100, 4).get_groups_and_subsamples([(0, 5), (1, 0)], None)
    with pytest.raises(ValueError, match="total_hdp_gpus must be at least 1, got 0"):
        BalancedCPScheduler(100, 0)
