"""Where a data iterator stands in the numbering of all ranks' items, and which of them it passes over."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tdp_megatron.arguments import checked_int
from tdp_megatron.errors import StateMismatchError
from tdp_megatron.ranges import NumberRanges

__all__ = ["ItemCursor", "LeftOutItems"]

logger = logging.getLogger(__name__)


class LeftOutItems:
    """Numbers of items that are left out: those of the configuration, and those added since, which states keep.

    Args:
        name: of the argument, for messages.
        ranges: pairs (begin, end) of the configuration.

    Raises:
        TypeError, ValueError: something else than pairs of ints with 0 <= begin <= end.
    """

    def __init__(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        self._name = name
        self._given = NumberRanges(name, ranges).ranges
        self.take([])

    def take(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have these added ranges instead of those before."""
        self._added = NumberRanges(self._name, ranges).ranges
        self.all = NumberRanges(self._name, (*self._given, *self._added))

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out these, too."""
        self.take((*self._added, *NumberRanges(self._name, ranges).ranges))

    def added_after(self, number: int) -> list[list[int]]:
        """The added ranges that ``number`` is not behind, for a state."""
        return [[begin, end] for begin, end in self._added if end > number]


class ItemCursor:
    """Reads a data iterator by the numbers that its items have among those of all ranks, which take turns.

    Item i of rank r of R has the number ``origin + i * R + r``, as ``Shard`` and Megatron's samplers deal data out.
    States of the iterator are kept from where steps end, in whole rounds of the ranks, so that all ranks keep the same.

    Args:
        source: the data iterator. One with ``skip_items(n)``, as our ``Loader``'s, passes items over at once; from
            others they are read and dropped. None where nothing is read.
        rank: this rank.
        num_ranks: ranks that take turns.
        left_out: numbers that are not read.
        begin: number of the first item wanted. A source that can skip is taken there from its beginning; another must
            stand there.
    """

    def __init__(
        self, source: Iterator[Any] | None, rank: int, num_ranks: int, left_out: LeftOutItems, begin: int
    ) -> None:
        self.source = source
        self.left_out = left_out
        self._rank, self._num_ranks = rank, num_ranks
        self._pending: dict[int, Any] = {}  # items read ahead, until their step has been handed out
        self.start(begin, self.origin_of(source, begin), self._source_state())
        self._stood_at = self._position() if begin and self.origin != begin else 0
        if begin and self.origin == begin and source is not None:
            logger.warning(
                "the data iterator (%s) has no skip_items: it is taken to stand at sample %d already, as one made from "
                "Megatron's consumed_samples does",
                type(source).__name__,
                begin,
            )

    @staticmethod
    def origin_of(source: Any, begin: int) -> int:
        """Number at which a fresh source stands."""
        return begin if getattr(source, "skip_items", None) is None else 0

    def start(self, begin: int, origin: int, state: Any) -> None:
        """Have number ``begin`` next.

        Args:
            begin: number of the next item.
            origin: number at which the source stands.
            state: of the source, there.
        """
        self.begin, self.origin = begin, origin
        self._must_reach: int | None = begin
        self._stood_at = 0
        self._read = 0  # items that the source has given or passed over since its origin
        self._keeps_states = True
        self._states = {0: copy.deepcopy(state)}  # of the source, after so many items
        self._pending.clear()

    def _source_state(self) -> Any:
        get_state = getattr(self.source, "state_dict", None)
        # Kept until its step has been handed out; the iterator may go on changing what it gave.
        return None if get_state is None else copy.deepcopy(get_state())

    def _position(self) -> int:
        """Items that the source says it has given; 0 where it does not."""
        position = getattr(self.source, "position", 0)
        return position if isinstance(position, int) else 0

    def end_of(self, count: int) -> int | None:
        """Behind the next ``count`` items of all ranks; None where ranges without end leave fewer."""
        return self.left_out.all.end_of(self.begin, count)

    def _index(self, number: int) -> int:
        """This rank's first item whose number is at least ``number``."""
        return -((self.origin + self._rank - number) // self._num_ranks)

    def _numbers(self, begin: int) -> Iterator[int]:
        """Numbers of this rank's items from ``begin`` on, without those left out."""
        left_out = self.left_out.all
        if not left_out:
            yield from itertools.count(self.origin + self._index(begin) * self._num_ranks + self._rank, self._num_ranks)
        number = begin
        while True:
            number, run = left_out.next_run(number)
            if not run:
                return
            number = self.origin + self._index(number) * self._num_ranks + self._rank
            if left_out.next_run(number)[0] == number:
                yield number
                number += 1

    def _advance(self, index: int) -> None:
        """Pass over items up to ``index``; raises StopIteration where the source has fewer."""
        source, distance = self.source, index - self._read
        skip = getattr(source, "skip_items", None)
        if source is None or not distance:
            return
        if skip is None:
            for _ in range(distance):
                next(source)
                self._read += 1
            return
        skip(distance)
        self._read = index

    def _keep_state(self, index: int) -> None:
        self._advance(index)
        if self._keeps_states:
            self._states[index] = self._source_state()

    def _draw(self, number: int, rounds: int) -> Any:
        """This rank's item of that number; on the way there the state after ``rounds`` items is kept."""
        assert self.source is not None
        index = (number - self.origin) // self._num_ranks
        if self._read <= rounds <= index:
            self._keep_state(rounds)
        self._advance(index)
        item = next(self.source)
        self._read += 1
        self._pending[number] = item
        return item

    def read(self, end: int) -> tuple[list[Any], int]:
        """This rank's items of a step.

        Args:
            end: number behind the step.

        Returns:
            The items, and how many the data ended short of the step; 1 where items of the step are left out.

        Raises:
            ValueError: the step begins beyond the end of the data.
        """
        self._reach()
        rounds = (end - self.origin) // self._num_ranks
        items: list[Any] = []
        try:
            for number in self._numbers(self.begin):
                if number >= end:
                    break
                items.append(self._pending[number] if number in self._pending else self._draw(number, rounds))
            if self._read <= rounds and rounds not in self._states:
                self._keep_state(rounds)
        except StopIteration:
            # Where some are left out, ranks that are short need not notice all of it: then any number says it.
            first, run = self.left_out.all.next_run(self.begin)
            is_whole = first == self.begin and run >= end - first
            return items, max(self._index(end) - self._read, 1) if is_whole else 1
        return items, 0

    def _reach(self) -> None:
        """Go where a configuration, a caller or a saved state has sent the source."""
        if self._must_reach is None:
            return
        if self._stood_at:
            raise ValueError(
                f"the data iterator stands at its item {self._stood_at} already; to begin at {self._must_reach}, "
                "give one that stands at its beginning, or load a saved state instead"
            )
        index = self._index(self._must_reach)
        try:
            self._advance(max(index, self._read))
        except StopIteration:
            raise ValueError(
                f"number {self._must_reach} is beyond the end of the data: of those from {self.origin} on, this rank's "
                f"iterator has fewer than {index} items"
            ) from None
        self._must_reach = None

    def stand_at_next(self) -> None:
        """Take the source to the next number, which must begin a round, and keep its state there."""
        if self.source is not None:
            self._reach()
            rounds = self._index(self.begin)
            if rounds not in self._states:
                self._keep_state(rounds)

    def has_more(self, end: int) -> bool:
        """Whether there is another item behind ``end``."""
        for number in self._numbers(end):
            if number in self._pending:
                return True
            try:
                self._draw(number, -1)
            except StopIteration:
                return False
            return True
        return False

    def note_end(self) -> None:
        """The data is too short for a step. A smaller one may follow, of which ranks have read unequal parts."""
        self._keeps_states = False

    def data_at(self, end: int) -> int:
        """Number at which the source stands in the state that goes with ``end``."""
        rounds = (end - self.origin) // self._num_ranks
        return self.origin + self._num_ranks * max(index for index in self._states if index <= rounds)

    def move(self, begin: int, *, data_at: int) -> None:
        """Have number ``begin`` next and forget what is not needed any more.

        Args:
            begin: number of the next item.
            data_at: number of the earliest state that is still wanted.
        """
        self.begin = begin
        first = (data_at - self.origin) // self._num_ranks
        self._pending = {n: item for n, item in self._pending.items() if n >= begin}
        self._states = {n: state for n, state in self._states.items() if n >= first}

    def skip_to(self, number: int) -> None:
        """Have this number next, without reading where the source can skip; the error of a wrong one comes at a step.

        Raises:
            TypeError: it is no integer.
            ValueError: it lies behind the next number.
        """
        number = checked_int("consumed_samples", number, least=0)
        if number < self.begin:
            raise ValueError(f"cannot go back from {self.begin} to {number}; load a saved state instead")
        self._pending = {n: item for n, item in self._pending.items() if n >= number}
        self.begin = self._must_reach = number

    def describe(self, end: int | None) -> str:
        """A step in words that are alike on all ranks which read the same."""
        last = "the end" if end is None else end
        return f"{self.begin} to {last} without {list(self.left_out.all.ranges)} of data that begins at {self.origin}"

    #: Entries of a state that are numbers.
    STATE_COUNTS = ("consumed_samples", "data_at")

    def state_dict(self, data_at: int) -> dict[str, Any]:
        """The position.

        Args:
            data_at: number of the item at which the source stands in its own state.
        """
        rounds, rest = divmod(data_at - self.origin, self._num_ranks)
        return {
            "consumed_samples": self.begin,
            "skip_samples": self.left_out.added_after(self.begin),
            "data_at": data_at,
            "data": None if rest else self._states.get(rounds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, and take the source to its own state, or past all items before where it has none.

        Raises:
            StateMismatchError: the numbers do not fit together, or the source needs a state of its own.
        """
        begin, data_at, data = state["consumed_samples"], state["data_at"], state.get("data")
        if data_at > begin:
            raise StateMismatchError(f"saved state: data_at {data_at} is behind consumed_samples {begin}")
        try:
            self.left_out.take(state.get("skip_samples", ()))
        except (TypeError, ValueError) as error:
            raise StateMismatchError(f"saved state: {error}") from error
        load = getattr(self.source, "load_state_dict", None)
        if load is None:
            self._check_stands_at(data)
        elif data is not None:
            load(copy.deepcopy(data))  # some iterators keep what they are given, and go on changing it
        elif getattr(self.source, "skip_items", None) is not None:
            self.start(begin, 0, self._source_state())
            self._stood_at = self._position()
            return
        else:
            raise StateMismatchError(
                f"saved state: it has no state of the data iterator, which {type(self.source).__name__} needs to be "
                f"taken to sample {begin}; it was saved on a rank that receives its data, or from an iterator without "
                "state_dict; load the state of a rank that reads"
            )
        self.start(begin, begin if data is None and self.source is not None else data_at, data)

    def _check_stands_at(self, data: Any) -> None:
        """Refuse a torchdata iterator that counts other items than the state it should have been loaded from."""
        counts = [s.get("num_yielded") if isinstance(s, Mapping) else None for s in (self._source_state(), data)]
        if None not in counts and counts[0] != counts[1]:
            raise StateMismatchError(
                f"saved state: it was taken at item {counts[1]} of the data iterator, which stands at its item "
                f"{counts[0]}; load its part 'data' into the iterator's loader before iter(), or give an iterator "
                "of tdp_megatron.nodes.Loader, which is taken there"
            )

    def release(self, data_at: int) -> None:
        """Let go of the source and of what was read ahead, but for the state that goes with ``data_at``."""
        self.source = None
        self.move(self.begin, data_at=data_at)
        self._states = dict(sorted(self._states.items(), key=lambda item: item[0])[:1])
        self._pending.clear()
