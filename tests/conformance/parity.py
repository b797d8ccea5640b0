"""Writes docs/parity.md: what Megatron does, what happens here, and the test that holds it.

    python tests/conformance/parity.py           write the table
    python tests/conformance/parity.py --run     run every test it names first, and fail if one fails

A test (test_parity_table.py) fails when the file is not what this writes, or when a named test does not exist.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
OUT = ROOT / "docs" / "parity.md"

CONFORMANCE = "tests/conformance"
DIFFERENTIAL = f"{CONFORMANCE}/test_megatron_core_differential.py"


class Row(NamedTuple):
    """One line of the table of behaviour."""

    feature: str
    megatron: str
    ours: str
    test: str
    """path::function, or a path; several with spaces."""


def rows_of(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def golden() -> list[tuple[str, str, str]]:
    """Kind of golden data, how many cases, and the test; counted in the data itself."""
    indexed = rows_of("indexed_golden.json")
    blending = rows_of("blending.json")
    cache = rows_of("cache_names.json")
    sizes = rows_of("blend_sizes.json")
    gpt = rows_of("gpt_indices.json")
    refused = sum("result" in case for case in gpt)
    draws = len(blending["weights"]) * len(blending["sizes"])
    samplers = rows_of("samplers.json")["cases"]
    packing = rows_of("packing.json")
    hybrid = rows_of("balanced_cp.json")["cases"]
    slices = sum(len(packing[f"zigzag_per_{what}"]) for what in ("sequence", "document"))
    with np.load(DATA / "blended_cache.npz") as stored:
        arrays = len(stored.files)
    return [
        ("indexed_dataset", f"{len(indexed['datasets'])} files", f"{CONFORMANCE}/test_indexed_golden.py"),
        ("indexed_get, indexed_slice", "all", f"{CONFORMANCE}/test_indexed_golden.py"),
        (
            "split, split_pair",
            f"{len(rows_of('splits.json')['single'])} strings, {len(rows_of('splits.json')['pair'])} pairs",
            f"{CONFORMANCE}/test_gpt_order_golden.py::test_splits "
            f"{CONFORMANCE}/test_gpt_order_golden.py::test_split_pairs",
        ),
        (
            "blend_from_list",
            f"{len(sizes['blend_from_list'])}, 1 refused on purpose",
            f"{CONFORMANCE}/test_cache_golden.py::test_blend_from_list",
        ),
        ("mid_level_sizes", str(len(sizes["sizes"])), f"{CONFORMANCE}/test_cache_golden.py::test_sizes_per_dataset"),
        ("rng_indices", "all", f"{CONFORMANCE}/test_rng_golden.py"),
        (
            "sample_index",
            str(len(rows_of("sample_index.json")["cases"])),
            f"{CONFORMANCE}/test_gpt_order_golden.py::test_sample_index",
        ),
        (
            "gpt_indices",
            f"{len(gpt)}: {len(gpt) - refused} equal, {refused} on which Megatron hangs or aborts are errors",
            f"{CONFORMANCE}/test_gpt_order_golden.py::test_gpt_indices_are_megatrons_bit_for_bit",
        ),
        (
            "gpt_indices: hashes, descriptions",
            f"{len(rows_of('gpt_hashes.json')['hashes'])}, {len(cache['descriptions'])}",
            f"{CONFORMANCE}/test_cache_golden.py::test_hashes_and_descriptions_of_the_gpt_indices",
        ),
        (
            "gpt_samples",
            f"{len(rows_of('gpt_samples.json')['cases'])} configurations x 12 samples",
            f"{CONFORMANCE}/test_gpt_samples_golden.py::test_samples_are_megatrons",
        ),
        (
            "blending",
            f"{draws} sized, {len(blending['exhaustive_sizes'])} exhaustive",
            f"{CONFORMANCE}/test_cache_golden.py::test_sized_blend "
            f"{CONFORMANCE}/test_cache_golden.py::test_exhaustive_blend",
        ),
        (
            "cache",
            f"{len(cache['cases'])} builder runs: every file name and byte; {arrays} arrays",
            f"{CONFORMANCE}/test_cache_golden.py::test_builder_gives_megatrons_datasets_and_files "
            f"{CONFORMANCE}/test_cache_golden.py::test_arrays_of_the_blended_cases",
        ),
        ("cache_default_dir", "1", f"{CONFORMANCE}/test_cache_golden.py::test_default_folder"),
        (
            "tokenizer_identifiers",
            str(len(cache["tokenizers"])),
            f"{CONFORMANCE}/test_cache_golden.py::test_tokenizer_identifiers",
        ),
        (
            "hazard: float32 ceil",
            str(len(cache["float32_ceil"])),
            f"{CONFORMANCE}/test_cache_golden.py::test_partial_last_samples_are_counted_exactly",
        ),
        (
            "hazard: what the key leaves out",
            str(len(cache["hash_hazard"])),
            "tests/unit/test_dataset_cache.py::test_settings_that_the_name_leaves_out "
            "tests/unit/test_dataset_cache.py::test_settings_that_change_nothing_do_not_build",
        ),
        ("mock_gpt", "all", f"{CONFORMANCE}/test_gpt_samples_golden.py::test_mock_data_is_megatrons"),
        (
            "samplers",
            f"{len(samplers)}, four samplers",
            f"{CONFORMANCE}/test_samplers_golden.py::test_samplers_give_megatrons_batches",
        ),
        ("dp_balanced", str(len(rows_of("dp_balanced.json")["cases"])), f"{CONFORMANCE}/test_schedule_golden.py"),
        (
            "balanced_cp",
            f"{len(hybrid)}: {sum(case[-1] is not None for case in hybrid)} equal, "
            f"{sum(case[-1] is None for case in hybrid)} on which Megatron asserts are errors",
            f"{CONFORMANCE}/test_schedule_golden.py::test_hybrid_groups_equal_megatrons "
            f"{CONFORMANCE}/test_hybrid_cp_differential.py",
        ),
        (
            "packing",
            f"{len(packing['packs'])} packs, {slices} slices",
            f"{CONFORMANCE}/test_packing_golden.py",
        ),
        ("mapping (BERT, ICT)", "0", ""),
    ]


SAME = "the same"

BEHAVIOUR = [
    Row(
        "document, sample and shuffle index",
        "`RandomState` draws, separate last epoch, int32 or int64",
        f"{SAME}, from C++ and by arithmetic instead of loops",
        f"{DIFFERENTIAL}::test_gpt_datasets",
    ),
    Row("lengths near 2^31", "int64 sums", SAME, f"{DIFFERENTIAL}::test_giant_sequences"),
    Row(
        "samples: masks, positions, padding, sample None",
        "tensors per sample",
        'the same with `pad_masking="megatron"`',
        f"{DIFFERENTIAL}::test_gpt_datasets",
    ),
    Row("blend, sized", "largest deficit, first on ties, doubles", SAME, f"{DIFFERENTIAL}::test_sized_blends"),
    Row("blend, exhaustive", "spent datasets drop out", SAME, f"{DIFFERENTIAL}::test_exhaustive_blends"),
    Row(
        "builder: splits, blends, blends per split, threads",
        "files of the cache",
        "the same names and bytes",
        f"{DIFFERENTIAL}::test_builders_with_files_and_caches",
    ),
    Row(
        "caches both ways",
        "a hit is the existence of the files",
        "each uses the other's and changes nothing",
        f"{DIFFERENTIAL}::test_caches_go_both_ways",
    ),
    Row(
        "several validation sets, full validation",
        "a list in place of the dataset",
        SAME,
        "tests/unit/test_dataset_config.py::test_several_validation_sets",
    ),
    Row(
        "`fast_cache_load`, `defer_npy_index_mmap`",
        "no file is opened at start-up",
        SAME,
        "tests/unit/test_dataset_config.py::test_a_fast_start_opens_nothing",
    ),
    Row(
        "`is_built_on_rank`",
        "None on other ranks",
        SAME,
        "tests/distributed/test_dataset_build_order.py::test_ranks_that_get_no_datasets",
    ),
]

DIFFERENCES = [
    Row(
        "a split without tokens",
        "endless loop, or the process aborts",
        "ValueError with prefix, split and remedy: nobody can train on it",
        "tests/unit/test_dataset_config.py::test_splits_without_tokens",
    ),
    Row(
        "split strings `-1,2,3`, empty, `0,0,0`",
        "read as 1, or NaN",
        "ValueError: not what was meant",
        f"{CONFORMANCE}/test_gpt_order_golden.py::test_splits",
    ),
    Row(
        "a partial last sample",
        "counted in float32: 16,777,218 tokens give 4,096 samples of 4,096",
        "counted exactly: 4,097; Megatron's own `__len__` says so, too",
        f"{DIFFERENTIAL}::test_float32_rounding_of_the_last_partial_sample",
    ),
    Row(
        "a sequence_length of 2^31 - 1",
        "int32 overflow with the extra token, AssertionError",
        "counted in int64",
        f"{DIFFERENTIAL}::test_the_longest_sequence_length",
    ),
    Row(
        "a partial last sample after an empty last document",
        "AssertionError",
        "padded like any other",
        f"{DIFFERENTIAL}::test_gpt_datasets",
    ),
    Row(
        "genuine tokens with the pad id",
        "no loss, and replaced by id 0",
        "kept: padding is known by its position (`pad_masking`)",
        f"{CONFORMANCE}/test_gpt_samples_golden.py::test_position_masking_keeps_genuine_pad_ids",
    ),
    Row(
        "loss mask where masks are computed once",
        "the padding of the first sample read stays masked in all later ones",
        'only with `pad_masking="megatron"`; otherwise a sample depends on nothing but its number',
        f"{CONFORMANCE}/test_gpt_samples_golden.py::test_samples_are_megatrons "
        f"{CONFORMANCE}/test_gpt_samples_golden.py::test_position_masking_keeps_genuine_pad_ids",
    ),
    Row(
        "pad = eod",
        "padding counts as end of document",
        "it does not",
        f"{CONFORMANCE}/test_gpt_samples_golden.py::test_position_masking_finds_padding_at_the_end_of_the_data",
    ),
    Row(
        "weights NaN, infinite, negative",
        "AssertionError without words, or garbage",
        "ValueError with source and value",
        "tests/unit/test_dataset_config.py::test_contradictions",
    ),
    Row(
        "weight 0, and datasets shorter than a sample in a blend by size",
        "AssertionError",
        "left out, with a warning",
        "tests/unit/test_dataset_config.py::test_weight_zero_is_skipped_and_reported "
        "tests/unit/test_dataset_config.py::test_a_dataset_shorter_than_a_sample_is_left_out_of_a_blend",
    ),
    Row(
        "a blend that draws more than a dataset has",
        "IndexError",
        "ValueError with dataset, numbers and the field to raise",
        "tests/unit/test_dataset_config.py::test_oversampling_is_a_clear_error",
    ),
    Row(
        "a blend list that mixes weights and prefixes",
        "weights are taken for prefixes",
        "ValueError with the item",
        f"{CONFORMANCE}/test_cache_golden.py::test_blend_from_list",
    ),
    Row(
        "settings and data that the cache key leaves out",
        "stale caches load silently",
        "a manifest beside the cache; a mismatch builds again with the reason in the log",
        "tests/unit/test_dataset_cache.py::test_settings_that_the_name_leaves_out "
        "tests/unit/test_dataset_cache.py::test_data_rewritten_at_the_same_path",
    ),
    Row(
        "truncated, foreign or wrong caches",
        "used",
        "checked once for shape, dtype, range and content, then built again or taken over",
        "tests/unit/test_dataset_cache.py::test_truncated_files "
        "tests/unit/test_dataset_cache.py::test_caches_of_others_are_looked_at",
    ),
    Row(
        "pickled arrays in a cache",
        "unpickled",
        "never",
        "tests/unit/test_dataset_cache.py::test_no_pickle_is_loaded",
    ),
    Row(
        "writing caches",
        "in place; concurrent jobs race",
        "temporary name, fsync, rename, one builder at a time",
        "tests/unit/test_dataset_cache.py::test_an_interrupted_build_leaves_no_cache "
        "tests/unit/test_dataset_cache.py::test_many_processes_build_each_cache_once",
    ),
    Row(
        "caches on node-local disks",
        "FileNotFoundError on the other nodes",
        "one build per file system",
        "tests/distributed/test_dataset_build_order.py::test_caches_that_other_nodes_do_not_see",
    ),
    Row(
        "an error on one rank",
        "the others wait in a barrier",
        "an error on all, with rank and cause",
        "tests/distributed/test_dataset_build_order.py::test_an_error_reaches_every_rank",
    ),
    Row(
        "`build` called on some ranks only",
        "hangs",
        "an error that names the absent ranks",
        "tests/distributed/test_dataset_build_order.py::test_a_call_on_one_rank_of_two_names_the_absent",
    ),
    Row(
        "a cache folder that cannot be written",
        "traceback",
        'CacheError that names `path_to_cache`; `path_to_cache=""` keeps none',
        "tests/unit/test_dataset_cache.py::test_a_folder_that_cannot_be_written",
    ),
    Row(
        "`fast_cache_load`, `defer_npy_index_mmap` without caches",
        "crash at the first access",
        "CacheError with the command that writes them",
        "tests/unit/test_dataset_cache.py::test_a_fast_start_without_caches",
    ),
    Row(
        "`token_dtype_code`",
        "guessed from the vocabulary: int32 can be read as uint16",
        "always None: the dtype is in the header of each file",
        "tests/unit/test_dataset_config.py::test_defaults_are_megatrons",
    ),
    Row(
        "reads past the end of a sequence",
        "tokens of the next one",
        "IndexError with sequence, offset and length",
        "tests/unit/test_indexed_readers.py::test_access_outside",
    ),
    Row(
        "a token the dtype cannot hold",
        "wraps silently",
        "ValueError with document, id and dtype",
        "tests/unit/test_indexed_builder.py::test_refused_value_is_named_with_its_document",
    ),
    Row(
        "damaged or foreign files",
        "other tokens, silently",
        "FormatError with file, byte, expected and found",
        "tests/unit/test_indexed_format.py::test_every_bit_flip",
    ),
    Row(
        "samplers: bad numbers, nothing left to read",
        "AssertionError",
        "ValueError with value, limit and remedy",
        f"{CONFORMANCE}/test_samplers_golden.py::test_bad_numbers_are_refused",
    ),
    Row(
        "hybrid CP: a sample on ranks that no process group has",
        "returned; its ranks then use process groups with other ranks",
        "the group's blocks by falling size, which aligns them; ScheduleError with `strict=True`",
        f"{CONFORMANCE}/test_schedule_golden.py::"
        "test_the_hybrid_class_equals_megatron_and_aligns_what_megatron_does_not",
    ),
]

MISSING = [
    "BERT, ICT and T5 samples: not here; their golden mapping is not compared.",
]


def tests_of(text: str) -> list[str]:
    return text.split()


def named_tests() -> list[str]:
    cells = [test for _, _, test in golden()] + [row.test for row in (*BEHAVIOUR, *DIFFERENCES)]
    return sorted({test for cell in cells for test in tests_of(cell)})


def absent_tests() -> list[str]:
    """Named tests that no file defines."""
    absent = []
    for test in named_tests():
        path, _, function = test.partition("::")
        file = ROOT / path
        if not file.is_file():
            absent.append(test)
        elif function:
            tree = ast.parse(file.read_text())
            if function not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                absent.append(test)
    return absent


def _link(test: str) -> str:
    path, _, function = test.partition("::")
    return f"[`{function or Path(path).name}`](../{path})"


def _table(head: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)]


def render() -> str:
    def links(cell: str) -> str:
        return ", ".join(_link(test) for test in tests_of(cell)) or "none"

    lines = [
        "# Parity with Megatron-LM",
        "",
        "Written by `python tests/conformance/parity.py`; do not edit. With `--run` it runs every test named here.",
        "",
        "## Golden data",
        "",
        "Outputs of Megatron-LM (commit d98e8a64, Aug 2026, NumPy 2.4.6, x86-64), kept in `tests/conformance/data`.",
        "",
        *_table(["kind", "cases", "test"], [[kind, cases, links(test)] for kind, cases, test in golden()]),
        "",
        "## The same behaviour",
        "",
        "Random inputs through megatron-core 0.16.1 and through this package, side by side in one process: 2,000 "
        "examples of the first test, fewer of the slower ones; `TDP_DIFFERENTIAL_EXAMPLES=50000` for more.",
        "",
        *_table(
            ["feature", "Megatron", "here", "test"],
            [[row.feature, row.megatron, row.ours, links(row.test)] for row in BEHAVIOUR],
        ),
        "",
        "## Deliberate differences",
        "",
        *_table(
            ["case", "Megatron", "here, and why", "test"],
            [[row.feature, row.megatron, row.ours, links(row.test)] for row in DIFFERENCES],
        ),
        "",
        "## Not here",
        "",
        *(f"- {line}" for line in MISSING),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/parity.md.")
    parser.add_argument("--run", action="store_true", help="run every test the table names first")
    arguments = parser.parse_args()
    if absent := absent_tests():
        print("no such tests: " + ", ".join(absent), file=sys.stderr)
        return 1
    if arguments.run:
        code = subprocess.run([sys.executable, "-m", "pytest", "-q", *named_tests()], cwd=ROOT, check=False).returncode
        if code:
            return code
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(render())
    print(f"wrote {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
