"""Logs of a run: which samples each rank consumed, and how training went, one JSON object per line.

    OUTPUT/attempt-000/run.json              options, layout, step it started from
    OUTPUT/attempt-000/refs-rank00000.jsonl  per step: this rank's microbatches with the samples in them
    OUTPUT/attempt-000/metrics.jsonl         per step: loss, tokens/s, waiting, imbalance, padding

Every start of the script is an attempt of its own, so that what a killed run did after its last checkpoint stays
apart from what its successor did.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from files import write_text
from tdp_megatron.types import Step

__all__ = ["RunLog", "next_attempt"]


def next_attempt(output: Path) -> int:
    """Number of the first attempt that ``output`` does not hold yet."""
    taken = [int(p.name.removeprefix("attempt-")) for p in output.glob("attempt-[0-9]*") if p.is_dir()]
    return max(taken, default=-1) + 1


class RunLog:
    """The log files of one rank in one attempt.

    Args:
        folder: Folder of the attempt.
        rank: Rank among all DP x CP ranks; rank 0 also writes ``run.json`` and the metrics.
        facts: Content of ``run.json``.
    """

    def __init__(self, folder: Path, rank: int, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._refs = (folder / f"refs-rank{rank:05d}.jsonl").open("w", encoding="utf-8")
        self._metrics = (folder / "metrics.jsonl").open("w", encoding="utf-8") if rank == 0 else None
        if rank == 0:
            write_text(folder / "run.json", json.dumps(facts, indent=2) + "\n")

    def write_refs(self, number: int, step: Step) -> None:
        """Note which samples this rank trained on in optimizer step ``number``, counted from 0."""
        microbatches = [
            {
                "first_rank": batch.first_rank,
                "cp_size": batch.local_cp_size,
                "sample_ids": list(batch.sample_ids),
                "refs": [list(ref) for ref in batch.refs],
            }
            for batch in step
        ]
        line = {"step": number, "index": step.index, "rank": self._rank, "microbatches": microbatches}
        print(json.dumps(line), file=self._refs, flush=True)

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Note how a step went; only rank 0 writes."""
        if self._metrics is not None:
            print(json.dumps(metrics), file=self._metrics, flush=True)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refs.close()
        if self._metrics is not None:
            self._metrics.close()
