"""A run that reads by plan, so that ranks meet only in the loop's own collectives; rank 1 fails once, and lives on.

torchrun --standalone --nproc-per-node 2 --max-restarts 1 plan_run.py DATA OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchdata.nodes import Mapper

from tdp_megatron.distributed import DpCpGroups, restart_store
from tdp_megatron.nodes import DocumentSample, IndexedRead, Loader, Pack, Reroute
from tdp_megatron.types import ParallelLayout, Sample

STEPS = 8
FAULT_STEP = 5
SAVE_EVERY = 2
GLOBAL_BATCH_SIZE = 4
DEADLINE_S = 3.0
#: How long the culprit still lives, and the time-out of the loop's own collectives.
CLEAN_UP_S = 120.0


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    prefix, output = sys.argv[1], Path(sys.argv[2])
    store = restart_store(timeout_s=60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=CLEAN_UP_S)
    )
    layout = ParallelLayout(2, 1, 64)

    def fault(sample: Sample) -> Sample:
        if rank == 1 and attempt == 0 and sample.ref[1] >= FAULT_STEP * GLOBAL_BATCH_SIZE:
            raise OSError("disk gone")
        return sample

    source = Mapper(DocumentSample(IndexedRead(prefix), max_seqlen=32, shuffle=False), fault)
    groups = DpCpGroups.create(layout, timeout_s=DEADLINE_S)
    loader: Loader[Any] = Loader(Reroute(Pack(source, layout, global_batch_size=GLOBAL_BATCH_SIZE), groups=groups))
    checkpoint = output / "checkpoint.json"
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    with (output / f"steps-{attempt}-{rank}.jsonl").open("w") as log:
        try:
            for step in loader:
                print(json.dumps([step.index, sorted(i for b in step for i in b.sample_ids)]), file=log, flush=True)
                dist.all_reduce(torch.ones(1))  # the loop's own, in the place of the gradients'
                if rank == 0 and (step.index + 1) % SAVE_EVERY == 0:
                    temporary = checkpoint.with_suffix(".tmp")
                    temporary.write_text(json.dumps(loader.state_dict()))
                    temporary.replace(checkpoint)
                if step.index + 1 == STEPS:
                    break
        except OSError:
            time.sleep(CLEAN_UP_S)  # such as writing what is left to object storage
            raise
    (output / f"done-{attempt}-{rank}").touch()


if __name__ == "__main__":
    main()
