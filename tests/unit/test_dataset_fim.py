"""Fill-in-the-middle: every rearranged document can be put together again, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tdp_megatron.datasets import BlendedMegatronDatasetBuilder, GPTDataset
from tdp_megatron.datasets.fim import GPTFIMDataset, GPTFIMDatasetConfig
from tdp_megatron.indexed import IndexedDatasetBuilder

EOD, PRE, MID, SUF, SPLIT = 0, 201, 202, 203, 35


class Letters:
    """One id per character."""

    eod = EOD
    unique_identifiers = {"class": "Letters"}  # noqa: RUF012

    @property
    def pad(self) -> int:
        raise NotImplementedError

    def token_to_id(self, token: str) -> int | None:
        return {"<pre>": PRE, "<mid>": MID, "<suf>": SUF, "#": SPLIT}.get(token)

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


EXTRA = {"prefix": "<pre>", "middle": "<mid>", "suffix": "<suf>", "pad": 0, "eod": 0}


def fields_of(prefix: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "random_seed": 3,
        "sequence_length": 90,
        "blend": ([prefix], None),
        "split": "1,0,0",
        "tokenizer": Letters(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "path_to_cache": "",
        "fim_rate": 1.0,
        "fim_spm_rate": 0.5,
        "fim_extra_tokens": EXTRA,
    }
    return {**fields, **changes}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("fim") / "data"
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    rng = np.random.default_rng(0)
    for _ in range(60):
        letters = rng.integers(ord("a"), ord("z") + 1, rng.integers(1, 40), dtype=np.int32)
        letters[::7] = SPLIT
        builder.add_document(np.append(letters, np.int32(EOD)), [len(letters) + 1])
    builder.finalize(f"{path}.idx")
    return str(path)


def build(prefix: str, cls: Any = GPTFIMDataset, **changes: Any) -> Any:
    config = GPTFIMDatasetConfig(**fields_of(prefix, **changes))
    return BlendedMegatronDatasetBuilder(cls, [40, None, None], lambda: True, config).build()[0]


def restore(ids: list[int]) -> tuple[list[int], bool]:
    """The original of a rearranged run, and whether it is in SPM order."""
    assert ids[0] == PRE
    assert [ids.count(token) for token in (PRE, MID, SUF)] == [1, 1, 1]
    middle = ids.index(MID)
    if ids[1] == SUF:
        suffix, rest = ids[2:middle], ids[middle + 1 :]
        return rest + suffix, True
    suffix_at = ids.index(SUF)
    return ids[1:suffix_at] + ids[middle + 1 :] + ids[suffix_at + 1 : middle], False


def runs(ids: list[int], token: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for value in ids:
        if value == token:
            found.append([])
        else:
            found[-1].append(value)
    return found


def test_documents_can_be_put_together_again(prefix: str) -> None:
    fim, plain = build(prefix), build(prefix, GPTDataset)
    assert len(fim) == len(plain)
    orders = []
    for idx in range(len(plain)):
        ours, original = (dataset._query(idx)[0].tolist() for dataset in (fim, plain))
        assert len(ours) == len(original) == 91
        # The last run may be cut: it became longer.
        for ours_run, original_run in list(zip(runs(ours, EOD), runs(original, EOD), strict=False))[:-2]:
            if original_run:
                restored, spm = restore(ours_run)
                assert restored == original_run
                orders.append(spm)
    assert 0.3 < np.mean(orders) < 0.7
    assert len(orders) > 60


@pytest.mark.parametrize(("rate", "spm"), [(0.0, 0.5), (1.0, 0.0), (1.0, 1.0)])
def test_rates(prefix: str, rate: float, spm: float) -> None:
    fim, plain = build(prefix, fim_rate=rate, fim_spm_rate=spm), build(prefix, GPTDataset)
    orders = []
    for idx in range(len(plain)):
        ours = fim._query(idx)[0].tolist()
        if not rate:
            assert ours == plain._query(idx)[0].tolist()
        else:
            orders += [restore(run)[1] for run in runs(ours, EOD)[:-1] if run]
    if rate:
        # With an empty prefix both orders look alike.
        assert np.mean(orders) == 1 if spm else np.mean(orders) < 0.2


def test_a_sample_is_a_function_of_its_number(prefix: str) -> None:
    one, two = build(prefix), build(prefix)
    forwards = [one[i]["tokens"].tolist() for i in range(10)]
    backwards = [two[i]["tokens"].tolist() for i in reversed(range(10))]
    assert forwards == backwards[::-1]
    assert one[-1]["tokens"].tolist() == one[len(one) - 1]["tokens"].tolist()
    assert forwards != [build(prefix, random_seed=4)[i]["tokens"].tolist() for i in range(10)]


def test_fragments(prefix: str) -> None:
    fim, plain = build(prefix, fim_split_sample="#", fim_fragment_rate=1.0), build(prefix, GPTDataset)
    compared = 0
    for idx in range(10):
        ours, original = (runs(dataset._query(idx)[0].tolist(), EOD)[0] for dataset in (fim, plain))
        pairs = list(zip(runs(ours, SPLIT), runs(original, SPLIT), strict=False))
        for ours_run, original_run in pairs[:-1]:
            if original_run:
                assert restore(ours_run)[0] == original_run
                compared += 1
    assert compared > 5


def test_documents_with_the_excepted_beginning(prefix: str) -> None:
    fim, plain = build(prefix, fim_no_prefix="#"), build(prefix, GPTDataset)
    first = plain._query(0)[0].tolist()
    for ours_run, original_run in zip(runs(fim._query(0)[0].tolist(), EOD), runs(first, EOD), strict=False):
        if original_run[:1] == [SPLIT]:
            assert ours_run[:1] == [SPLIT]


def test_what_becomes_shorter_is_padded(prefix: str) -> None:
    class Pairs(Letters):
        """Two letters are one id where that is possible: encoding again gives fewer ids."""

        def tokenize(self, text: str) -> list[int]:
            return [1000 + i for i in range((len(text) + 1) // 2)]

    fim = build(prefix, tokenizer=Pairs())
    sample = fim[0]
    real = len(fim._query(0)[0])
    assert real < 91
    assert sample["loss_mask"].tolist() == [1.0] * (real - 1) + [0.0] * (91 - real)
    assert sample["tokens"][real:].tolist() == [0] * (90 - real)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fim_rate": 1.5}, ValueError, r"fim_rate must be in \[0, 1\], got 1.5"),
        ({"fim_spm_rate": -1}, ValueError, "fim_spm_rate must be in"),
        ({"fim_extra_tokens": None}, ValueError, "fim_extra_tokens has no prefix, middle, suffix"),
        ({"fim_extra_tokens": {"prefix": 1, "middle": 2}}, ValueError, "has no suffix"),
        ({"fim_split_sample": "#"}, ValueError, "go together"),
        ({"inter_document_masking": True}, ValueError, "which fill-in-the-middle moves"),
        ({"tokenizer": object()}, TypeError, "object has no tokenize"),
        ({"fim_extra_tokens": {**EXTRA, "suffix": "<none>"}}, ValueError, "no token '<none>'"),
    ],
)
def test_contradictions(prefix: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(prefix, **changes)
