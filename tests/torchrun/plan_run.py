"""A run that reads by plan, so that ranks meet only in the loop's own collectives; rank 1 meets a fault per attempt.

    torchrun --standalone --nproc-per-node 2 --max-restarts N plan_run.py DATA OUTPUT

Having failed to read, rank 1 lives on, so that the other is stuck; in the other attempts its process ends, and the
other's collective is cut off. The attempt after the last fault meets a disk read that fails once, and ends well.
Imported by the test for its constants.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from planted import Faulty, die, fail_next_read, raise_memory_error

from tdp_megatron.distributed import DpCpGroups, restart_store
from tdp_megatron.nodes import DocumentSample, IndexedRead, Loader, Pack, Reroute
from tdp_megatron.nodes import pack as pack_module
from tdp_megatron.types import ParallelLayout, Step

FAULTS = (
    "raises in read",
    "raises in plan",
    "raises in pack",
    "killed before the step",
    "killed in the step",
    "killed after the step",
    "ends early",
    "leaves in the step",
    "plans diverge",
    "late",
    "ends early where plans are compared",
)
#: Found in a collective of the data runtime, which there is in every step then.
COMPARED = ("plans diverge", "late", "ends early where plans are compared")
SAVE_EVERY = 2
GLOBAL_BATCH_SIZE = 4
DEADLINE_S = 3.0
#: How long the culprit still lives, and the time-out of the loop's own collectives.
CLEAN_UP_S = 120.0


def fault_step(attempt: int) -> int:
    """The step of an attempt's fault: the second one that it makes, and so with work to do again."""
    return 3 + SAVE_EVERY * attempt


STEPS = fault_step(len(FAULTS)) + 3


class Run:
    """One rank of one attempt."""

    def __init__(self, prefix: str, output: Path) -> None:
        self.rank, self.attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.output = output
        fault = FAULTS[self.attempt] if self.attempt < len(FAULTS) else "a read fails once"
        self.fault = fault if self.rank == 1 else ""
        self.at = fault_step(self.attempt)
        layout = ParallelLayout(2, 1, 64)
        samples = DocumentSample(IndexedRead(prefix, mmap=False), max_seqlen=32, shuffle=False)
        self.pack = Pack(Faulty(samples, self.fault_in_read), layout, global_batch_size=GLOBAL_BATCH_SIZE)
        groups = DpCpGroups.create(layout, timeout_s=DEADLINE_S)
        self.loader: Loader[Step] = Loader(Reroute(self.pack, groups=groups, agree_every=int(fault in COMPARED)))
        self.checkpoint = output / "checkpoint.json"
        self.note("pid", str(os.getpid()))

    def note(self, name: str, text: str = "") -> None:
        (self.output / f"{name}-{self.attempt}-{self.rank}").write_text(text)

    def fault_in_read(self, passed: int) -> None:
        if passed < self.at * GLOBAL_BATCH_SIZE:
            return
        if self.fault == "raises in read":
            self.note("fault")
            raise OSError("disk gone")
        if self.fault == "killed before the step":
            self.die()
        if self.fault.startswith("ends early"):
            self.note("fault")
            raise StopIteration
        if self.fault == "late":
            self.note("fault")
            time.sleep(CLEAN_UP_S)

    def die(self) -> None:
        time.sleep(2.5)  # the other rank has noted its step by then, and waits
        self.note("fault")
        die()

    def plant(self) -> None:
        """Plant the fault of the coming step where it is not in the source."""
        if self.fault == "raises in plan":
            self.pack._plan = raise_memory_error  # type: ignore[method-assign]
        elif self.fault == "raises in pack":
            pack_module.packed_batches = raise_memory_error
        elif self.fault == "plans diverge":
            self.pack.algorithm = "dp_balanced"
        elif self.fault == "a read fails once":
            fail_next_read(lambda: self.note("retried"))
            return
        else:
            return
        self.note("fault")

    def train(self) -> None:
        if self.checkpoint.exists():
            self.loader.load_state_dict(json.loads(self.checkpoint.read_text()))
        with (self.output / f"steps-{self.attempt}-{self.rank}.jsonl").open("w") as log:
            for step in self.loader:
                print(json.dumps([step.index, sorted(i for b in step for _, i in b.refs)]), file=log, flush=True)
                self.train_step(step.index)
                if step.index + 1 == STEPS:
                    self.note("done")
                    break
                if step.index + 1 == self.at:
                    self.plant()

    def train_step(self, index: int) -> None:
        at_fault = index == self.at
        if at_fault and self.fault == "killed in the step":
            self.die()
        if at_fault and self.fault == "leaves in the step":
            raise ValueError("loss is NaN")
        dist.all_reduce(torch.ones(1))  # the loop's own, in the place of the gradients'
        if at_fault and self.fault == "killed after the step":
            self.die()
        if self.rank == 0 and (index + 1) % SAVE_EVERY == 0:
            temporary = self.checkpoint.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.loader.state_dict()))
            temporary.replace(self.checkpoint)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        # torchrun ends the other ranks of its machine as soon as one has; those of other machines live on a while.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store = restart_store(timeout_s=60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=CLEAN_UP_S)
    )
    run = Run(sys.argv[1], Path(sys.argv[2]))
    try:
        run.train()
    except OSError:
        time.sleep(CLEAN_UP_S)  # such as writing what is left to object storage
        raise
    except ValueError as error:
        print(error, file=sys.stderr)
        run.note("fault")
        sys.exit(1)


if __name__ == "__main__":
    main()
