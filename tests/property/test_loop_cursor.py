"""Items that ranks take in turn, some left out: any ranks, any moves, against the list of all numbers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdp_megatron.loops.cursor import ItemCursor, LeftOutItems

END = 90


class Dealt:
    """One rank's items of data with END items; item n is n."""

    def __init__(self, rank: int, num_ranks: int, at: int = 0, end: int = END) -> None:
        self.rank, self.num_ranks, self.at, self.end = rank, num_ranks, at, end
        self.read: list[int] = []

    def __iter__(self) -> Dealt:
        return self

    def __next__(self) -> int:
        number = self.at + self.rank
        if number >= self.end:
            raise StopIteration
        self.at += self.num_ranks
        self.read.append(number)
        return number

    @property
    def left(self) -> int:
        return max(0, -((self.at + self.rank - self.end) // self.num_ranks))


class Stateful(Dealt):
    """Its state counts the items of all ranks, as a ``Shard``'s does."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Skipping(Stateful):
    def skip_items(self, n: int) -> None:
        if n > self.left:
            raise StopIteration
        self.at += n * self.num_ranks


KINDS: dict[str, type[Dealt]] = {"plain": Dealt, "stateful": Stateful, "skipping": Skipping}


class Ranks:
    """Cursors of all ranks, as a job without collectives has them."""

    def __init__(self, kind: str, num_ranks: int, ranges: Any, begin: int = 0, state: Any = None) -> None:
        at = 0
        if kind == "plain":
            at = begin if state is None else state["consumed_samples"]
        elif kind == "stateful":
            at = begin
        self.sources = [KINDS[kind](rank, num_ranks, at) for rank in range(num_ranks)]
        self.cursors = [
            ItemCursor(source, rank, num_ranks, LeftOutItems("skip_samples", ranges), begin)
            for rank, source in enumerate(self.sources)
        ]
        self.data_at = self.cursors[0].origin
        if state is not None:
            for cursor in self.cursors:
                cursor.load_state_dict(json.loads(json.dumps(state)))
            self.data_at = self.cursors[0].origin

    @property
    def begin(self) -> int:
        (begin,) = {cursor.begin for cursor in self.cursors}
        return begin

    def produce(self, count: int) -> tuple[list[int] | None, int, int]:
        """A step, as it is made ahead: its numbers, None at the end; its end, and where its state is."""
        (end,) = {cursor.end_of(count) for cursor in self.cursors}
        if end is None:
            return self.note_end()
        read = [cursor.read(end) for cursor in self.cursors]
        missing = [short for _, short in read]
        if any(missing):
            more = [cursor.has_more(end) for cursor, short in zip(self.cursors, missing, strict=True) if not short]
            # What Exchange asks of an end that all ranks share.
            assert not any(more)
            assert max(missing) - min(missing) <= 1
            return self.note_end()
        (data_at,) = {cursor.data_at(end) for cursor in self.cursors}
        return sorted(number for items, _ in read for number in items), end, data_at

    def note_end(self) -> tuple[None, int, int]:
        for cursor in self.cursors:
            cursor.note_end()
        return None, 0, 0

    def hand_out(self, end: int, data_at: int) -> None:
        self.data_at = data_at
        for cursor in self.cursors:
            cursor.move(end, data_at=data_at)

    def state(self) -> dict[str, Any]:
        states = [cursor.state_dict(self.data_at) for cursor in self.cursors]
        assert all(state == states[0] for state in states), states
        return states[0]


RANGE = st.tuples(st.integers(0, END + 20), st.sampled_from([0, 1, 2, 3, 7, 20, 10**12])).map(lambda p: (p[0], sum(p)))
RANGES = st.lists(RANGE, max_size=4)
MOVE = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("ahead"), st.integers(1, 4)),
    st.tuples(st.just("skip_to"), st.integers(0, 20)),
    st.tuples(st.just("skip"), RANGES),
    st.tuples(st.just("restart"), st.integers(1, 5)),
)


@given(
    kind=st.sampled_from(list(KINDS)),
    num_ranks=st.integers(1, 5),
    ranges=RANGES,
    begin=st.integers(0, 30),
    moves=st.lists(MOVE, min_size=1, max_size=14),
)
def test_ranks_read_what_is_not_left_out(
    kind: str, num_ranks: int, ranges: Any, begin: int, moves: list[tuple[str, Any]]
) -> None:
    ranks = Ranks(kind, num_ranks, ranges, begin)
    left_out = list(ranges)

    def kept(number: int) -> bool:
        return not any(first <= number < last for first, last in left_out)

    for move, argument in moves:
        if move in ("step", "ahead"):
            count = argument * num_ranks
            numbers, end, data_at = ranks.produce(count)
            wanted = [n for n in range(ranks.begin, END) if kept(n)][:count]
            if numbers is None:
                assert len(wanted) < count
                continue
            assert numbers == wanted
            if move == "step":
                ranks.hand_out(end, data_at)
                assert ranks.begin == wanted[-1] + 1
        elif move == "skip_to":
            target = ranks.begin + argument
            if target > END - num_ranks:
                continue  # beyond the end is an error of the next step
            for cursor in ranks.cursors:
                cursor.skip_to(target)
            assert ranks.begin == target
        elif move == "skip":
            left_out += argument
            for cursor in ranks.cursors:
                cursor.left_out.add(argument)
        else:
            num_ranks = argument
            if kind == "stateful" and ranks.state()["data"] is None:
                continue
            ranks = Ranks(kind, num_ranks, ranges, begin, ranks.state())
    if kind == "skipping" and all(move in ("step", "ahead", "skip_to", "restart") for move, _ in moves):
        assert all(kept(n) for source in ranks.sources for n in source.read), "an item that is left out was read"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_begin_beyond_the_end_is_an_error_of_the_step(kind: str) -> None:
    cursor = ItemCursor(KINDS[kind](1, 2), 1, 2, LeftOutItems("skip_samples", []), 0)
    cursor.skip_to(END + 2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"number 92 is beyond the end .* from 0 on, .* fewer than 46 items"):
            cursor.read(END + 4)


@pytest.mark.parametrize("number", [-1, 3])
def test_no_way_back(number: int) -> None:
    cursor = ItemCursor(iter([1, 2, 3]), 0, 1, LeftOutItems("skip_samples", []), 5)
    with pytest.raises(ValueError, match="must not be negative|cannot go back from 5 to 3"):
        cursor.skip_to(number)
    with pytest.raises(TypeError, match="must be an int, got 6.0"):
        cursor.skip_to(6.0)  # type: ignore[arg-type]


def test_a_range_that_is_long_costs_nothing() -> None:
    source = Skipping(0, 2, end=10**15)
    cursor = ItemCursor(source, 0, 2, LeftOutItems("skip_samples", [(3, 10**14)]), 0)
    numbers = []
    while len(numbers) < 6:
        end = cursor.end_of(4)
        assert end is not None
        items, missing = cursor.read(end)
        assert not missing
        numbers += items
        cursor.move(end, data_at=cursor.data_at(end))
    assert numbers[:2] == [0, 2]
    assert source.read == numbers == [0, 2, *itertools.islice(itertools.count(10**14, 2), len(numbers) - 2)]
