from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np
import numpy.typing as npt

def permute(places: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]: ...
def instant_pieces(
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    begin: int,
    end: int,
    begin_byte: int,
    end_byte: int,
    itemsize: int,
    window: int,
    key: int,
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def blend_period(shares: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]: ...
def map_descriptor(descriptor: int) -> npt.NDArray[np.uint8]: ...
def map_file(path: str) -> npt.NDArray[np.uint8]: ...
def sync_file_system(path: str) -> None: ...

class LegacyRandom:
    @overload
    def __init__(self, seed: int) -> None: ...
    @overload
    def __init__(self, key: npt.NDArray[np.uint32]) -> None: ...
    def shuffle(self, values: npt.NDArray[Any], stop: Callable[[], None] | None = None) -> None: ...

def build_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    sequence_length: int,
    extra_tokens: int,
    num_samples: int,
    wide: bool,
    stop: Callable[[], None] | None = None,
) -> npt.NDArray[Any]: ...
def blend_continue(
    weights: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    position: int,
    n: int,
    stop: Callable[[], None] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
def blend_weighted(
    weights: npt.NDArray[np.float64],
    targets: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    active: npt.NDArray[np.bool_],
    stop: Callable[[], None] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
def blend_linear(
    points: npt.NDArray[np.float64],
    rows: npt.NDArray[np.float64],
    targets: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    active: npt.NDArray[np.bool_],
    position: int,
    n: int,
    stop: Callable[[], None] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...
def blend_exhaustive(
    sizes: npt.NDArray[np.int64], stop: Callable[[], None] | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]: ...

class SpanReader:
    @property
    def is_mapped(self) -> bool: ...
    def pieces(
        self, sample: npt.NDArray[np.int64], start: npt.NDArray[np.int64], length: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def document_lengths(self, sample: int) -> npt.NDArray[np.int64]: ...

def gpt_reader(
    source: npt.NDArray[np.uint8] | None,
    dtype_code: int,
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    document_index: npt.NDArray[np.int32],
    sample_index: npt.NDArray[Any],
    shuffle_index: npt.NDArray[Any],
    extra_tokens: int,
    ignore_label: int,
    eod_no_loss: int,
    eod_reset: int,
) -> SpanReader: ...
def run_reader(
    source: npt.NDArray[np.uint8] | None,
    dtype_code: int,
    byte_offsets: npt.NDArray[np.int64],
    available: npt.NDArray[np.int64],
    ignore_label: int,
    eod_no_loss: int,
    eod_reset: int,
) -> SpanReader: ...
def instant_reader(
    source: npt.NDArray[np.uint8] | None,
    dtype_code: int,
    lengths: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    begin: int,
    end: int,
    begin_byte: int,
    end_byte: int,
    window: int,
    sequence_length: int,
    extra_tokens: int,
    keys: Callable[[int], tuple[int, int]],
    ignore_label: int,
    eod_no_loss: int,
    eod_reset: int,
) -> SpanReader: ...
def read_spans(
    readers: list[SpanReader],
    reader_index: npt.NDArray[np.int64] | None,
    sample: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    destination: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.float32],
    position_ids: npt.NDArray[np.int64] | None,
) -> None: ...
def read_rows(
    readers: list[SpanReader],
    reader_index: npt.NDArray[np.int64] | None,
    sample: npt.NDArray[np.int64],
    first: int,
    tokens: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.float32],
    position_ids: npt.NDArray[np.int64],
    cu_seqlens: npt.NDArray[np.int32] | None = None,
    max_seqlen: npt.NDArray[np.int32] | None = None,
) -> None: ...
def read_documents(
    reader: SpanReader, sample: int, position_ids: npt.NDArray[np.int64], cu_seqlens: npt.NDArray[np.int32]
) -> int: ...

class RowBuffers:
    def __init__(self, names: list[str], to_tensor: Callable[[npt.NDArray[Any]], Any]) -> None: ...
    def __len__(self) -> int: ...
    def add(
        self,
        tokens: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        loss_mask: npt.NDArray[np.float32],
        position_ids: npt.NDArray[np.int64],
        cu_seqlens: npt.NDArray[np.int32] | None = None,
        max_seqlen: npt.NDArray[np.int32] | None = None,
    ) -> None: ...
    def read(
        self,
        readers: list[SpanReader],
        reader_index: npt.NDArray[np.int64] | None,
        sample: npt.NDArray[np.int64],
        first: int,
        next: int,
    ) -> dict[str, Any] | None: ...

def gather_tokens(
    source: npt.NDArray[np.uint8],
    dtype_code: int,
    piece_offset: npt.NDArray[np.int64],
    piece_count: npt.NDArray[np.int64],
    span_begin: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    destination: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.float32],
    position_ids: npt.NDArray[np.int64] | None,
    ignore_label: int,
    eod_no_loss: int,
    eod_reset: int,
) -> None: ...
def set_num_threads(n: int) -> None: ...
def set_read_ahead(when: str) -> None: ...
def copy_spans(
    source: npt.NDArray[np.uint8],
    source_offset: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
    target_offset: npt.NDArray[np.int64],
    num_bytes: npt.NDArray[np.int64],
) -> None: ...
def pack(
    rows: npt.NDArray[np.int64],
    loss_edges: npt.NDArray[np.int64] | None,
    tokens: npt.NDArray[np.uint8],
    dtype_code: int,
    labels: npt.NDArray[np.int64] | None,
    loss_mask: npt.NDArray[np.float32] | None,
    position_ids: npt.NDArray[np.int64] | None,
    out_tokens: npt.NDArray[np.int64],
    out_labels: npt.NDArray[np.int64],
    out_loss_mask: npt.NDArray[np.float32],
    out_position_ids: npt.NDArray[np.int64],
    out_padding_mask: npt.NDArray[np.bool_],
    out_document_id: npt.NDArray[np.int32],
    pad_token: int,
    pad_label: int,
    ignore_label: int,
    zero_positions: bool,
) -> None: ...
def pack_bytes(
    rows: npt.NDArray[np.int64], source: npt.NDArray[np.uint8], width: int, out: npt.NDArray[np.uint8]
) -> None: ...
def cp_positions(cu_seqlens: npt.NDArray[Any], cp_size: int, cp_rank: int) -> npt.NDArray[np.int64]: ...

class Column:
    @overload
    def __init__(self, arrays: list[npt.NDArray[Any]]) -> None: ...
    @overload
    def __init__(self, joined: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None: ...
    @staticmethod
    def find(items: list[Mapping[str, Any]], key: str, floats: bool, like: Column | None = None) -> Column | None: ...
    def __len__(self) -> int: ...
    @property
    def lengths(self) -> npt.NDArray[np.int64]: ...
    def copy_spans(
        self,
        samples: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        target: npt.NDArray[np.uint8],
        targets: npt.NDArray[np.int64],
    ) -> None: ...
    def narrow_spans(
        self,
        dtype_code: int,
        samples: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        follows: npt.NDArray[np.int64],
        last_labels: npt.NDArray[np.int64],
        target: npt.NDArray[np.uint8],
        targets: npt.NDArray[np.int64],
    ) -> None: ...

def scan_samples(
    tokens: Column, labels: Column, loss_mask: Column, position_ids: Column | None, ignore_label: int
) -> tuple[int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
def number_samples(rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], key: int) -> npt.NDArray[np.int64]: ...
def fill_spans(
    destinations: npt.NDArray[np.int64],
    widths: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    entries: npt.NDArray[np.int64],
    pad_id: int,
    ignore_label: int,
    tokens: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.float32],
    position_ids: npt.NDArray[np.int64],
    padding_mask: npt.NDArray[np.bool_],
    document_id: npt.NDArray[np.int32],
) -> None: ...

class ScheduleInput:
    def __init__(
        self,
        seqlens: npt.NDArray[np.int64],
        cp_sizes: list[int],
        num_ranks: int,
        token_limit: int,
        tail: int,
        max_sequences: int,
        microbatches_multiple: int,
        cost: list[float],
    ) -> None: ...

_ScheduleOps = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

def schedule_buddy(input: ScheduleInput, lower_bound: float) -> _ScheduleOps: ...
def schedule_waves(
    input: ScheduleInput, lower_bound: float, lockstep: bool, pipeline: bool, stages_before: float
) -> _ScheduleOps: ...
def schedule_fill_tails(
    input: ScheduleInput,
    lockstep: bool,
    pipeline: bool,
    stages_before: float,
    first_rank: npt.NDArray[np.int64],
    cp_size: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    sample_ids: npt.NDArray[np.int64],
) -> _ScheduleOps: ...
def schedule_lpt(input: ScheduleInput, cp_size: int) -> _ScheduleOps: ...
def schedule_kk(input: ScheduleInput, cp_size: int) -> _ScheduleOps: ...
def schedule_best_fit(input: ScheduleInput, cp_size: int) -> _ScheduleOps: ...
def schedule_next_fit(input: ScheduleInput, cp_size: int) -> _ScheduleOps: ...
def schedule_stream_wave(input: ScheduleInput, leader: int) -> _ScheduleOps: ...
def schedule_dynamic_cp(input: ScheduleInput, unit: int) -> _ScheduleOps: ...
def schedule_dynamic_cp_within(
    input: ScheduleInput, seconds: float, lockstep: bool, pipeline: bool, stages_before: float
) -> _ScheduleOps | None: ...
def schedule_step(
    first_rank: npt.NDArray[np.int64],
    cp_size: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    padded_lengths: npt.NDArray[np.int64],
    tokens_per_rank: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
    num_ranks: int,
    cost: list[float],
    mode: str,
    stages_before: float,
) -> float: ...
def schedule_free_step(
    first_rank: npt.NDArray[np.int64],
    cp_size: npt.NDArray[np.int64],
    seconds: npt.NDArray[np.float64],
    num_ranks: int,
) -> float: ...
