"""A run that reads by plan, so that ranks meet only in the loop's own collectives; rank 1 meets a fault per attempt.

    torchrun --standalone --nproc-per-node 2 --max-restarts N plan_run.py DATA OUTPUT

Having failed to read, rank 1 lives on, so that the other is stuck; killed, it can say nothing. Imported by the test for
its constants.
"""

from __future__ import annotations

import json
import os
import signal
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

FAULTS = ("raises in read", "killed before the step", "killed in the step", "killed after the step")
SAVE_EVERY = 2
GLOBAL_BATCH_SIZE = 4
DEADLINE_S = 3.0
#: How long the culprit still lives, and the time-out of the loop's own collectives.
CLEAN_UP_S = 120.0


def fault_step(attempt: int) -> int:
    """The step of an attempt's fault: the second one that it makes, and so with work to do again."""
    return 3 + SAVE_EVERY * attempt


STEPS = fault_step(len(FAULTS)) + 3


def die() -> None:
    time.sleep(2.5)  # the other rank has noted its step by then, and waits
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # torchrun ends the other ranks of its machine as soon as one has ended; those of other machines live on a while.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prefix, output = sys.argv[1], Path(sys.argv[2])
    fault = FAULTS[attempt] if rank == 1 and attempt < len(FAULTS) else ""
    at = fault_step(attempt)
    store = restart_store(timeout_s=60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=CLEAN_UP_S)
    )
    layout = ParallelLayout(2, 1, 64)

    def read(sample: Sample) -> Sample:
        if sample.ref[1] >= at * GLOBAL_BATCH_SIZE:
            if fault == "raises in read":
                raise OSError("disk gone")
            if fault == "killed before the step":
                die()
        return sample

    source = Mapper(DocumentSample(IndexedRead(prefix), max_seqlen=32, shuffle=False), read)
    groups = DpCpGroups.create(layout, timeout_s=DEADLINE_S)
    loader: Loader[Any] = Loader(Reroute(Pack(source, layout, global_batch_size=GLOBAL_BATCH_SIZE), groups=groups))
    checkpoint = output / "checkpoint.json"
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    (output / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    with (output / f"steps-{attempt}-{rank}.jsonl").open("w") as log:
        try:
            for step in loader:
                print(json.dumps([step.index, sorted(i for b in step for _, i in b.refs)]), file=log, flush=True)
                if fault == "killed in the step" and step.index == at:
                    die()
                dist.all_reduce(torch.ones(1))  # the loop's own, in the place of the gradients'
                if fault == "killed after the step" and step.index == at:
                    die()
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
