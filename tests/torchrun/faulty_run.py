"""A run of the data runtime whose attempts each meet one fault; torchrun starts it again from its last checkpoint.

    torchrun --standalone --nproc-per-node 2 --max-restarts N faulty_run.py DATA OUTPUT

Rank 1 is the culprit of attempt i's fault, ``FAULTS[i]``, which comes three steps into the attempt. The attempt after
the last fault meets a disk read that fails once, and ends well. Imported by the test for its constants.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from planted import Faulty, die, fail_next_read, raise_memory_error

from tdp_megatron.distributed import DpCpGroups, Exchange, restart_store, sum_int64
from tdp_megatron.nodes import DocumentSample, IndexedRead, Loader, Pack, Reroute, Shard
from tdp_megatron.nodes import pack as pack_module
from tdp_megatron.schedule import Plan, schedule
from tdp_megatron.types import ParallelLayout, Step

FAULTS = (
    "raises in read",
    "raises in plan",
    "raises in exchange",
    "raises in pack",
    "killed before the exchange",
    "killed in the exchange",
    "killed after the exchange",
    "ends early",
    "plans diverge",
    "late",
)
CULPRIT = 1
FAULT_AFTER = 3
SAVE_EVERY = 2
STEPS = SAVE_EVERY * len(FAULTS) + 6
GLOBAL_BATCH_SIZE = 8
DEADLINE_S = 8.0


def samples(prefix: str) -> DocumentSample:
    """The global order of samples."""
    return DocumentSample(IndexedRead(prefix, mmap=False), max_seqlen=32, num_epochs=None, seed=3)


def die_in_exchange(real: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(out: Any, given: Any, *sizes: Any, **options: Any) -> Any:
        return die() if sizes else real(out, given, **options)  # what is gathered from all has no sizes

    return exchange


def plan_otherwise(*arguments: Any, **limits: Any) -> Plan:
    seqlens, layout, cost, mode, _ = arguments
    return schedule(seqlens, layout, cost, mode, "dp_balanced", **limits)


class Run:
    """One rank of one attempt."""

    def __init__(self, prefix: str, output: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.folder = output / f"attempt-{self.attempt:02d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = output / "checkpoint.json"
        self.fault = FAULTS[self.attempt] if self.attempt < len(FAULTS) else "a read fails once"
        self.step = 0
        self.fault_step = -1
        self.sleeping = False
        layout = ParallelLayout(2, 1, 64)
        self.groups = DpCpGroups.create(layout, timeout_s=DEADLINE_S)
        self.exchange = Exchange(self.groups)
        source = Faulty(Shard(samples(prefix), rank=self.rank, num_ranks=2), self.fault_in_read)
        self.pack = Pack(source, layout, global_batch_size=GLOBAL_BATCH_SIZE, algorithm="lpt", exchange=self.exchange)
        self.loader: Loader[Step] = Loader(Reroute(self.pack, groups=self.groups, agree_every=1))

    def has_fault(self) -> bool:
        return self.rank == CULPRIT and self.step == self.fault_step

    def fault_in_read(self, passed: int) -> None:
        if not self.has_fault():
            return
        if self.fault == "raises in read":
            raise OSError("disk gone")
        if self.fault == "killed before the exchange":
            die()
        if self.fault == "ends early":
            raise StopIteration
        if self.fault == "late":
            self.sleeping = True
            time.sleep(600)

    def fault_elsewhere(self) -> None:
        """Plant the fault of this step where it is not in the source."""
        if self.fault == "raises in plan":
            self.pack._plan = raise_memory_error  # type: ignore[method-assign]
        elif self.fault == "raises in exchange":
            self.exchange.transfer = raise_memory_error  # type: ignore[method-assign]
        elif self.fault == "raises in pack":
            pack_module.packed_batches = raise_memory_error
        elif self.fault == "killed in the exchange":
            dist.all_to_all_single = die_in_exchange(dist.all_to_all_single)
        elif self.fault == "killed after the exchange":
            pack_module.packed_batches = die
        elif self.fault == "plans diverge":
            pack_module.schedule = plan_otherwise  # the settings, which are compared before, are the same
        elif self.fault == "a read fails once":
            fail_next_read(lambda: self.note("retried", {"step": self.step}))

    def note(self, name: str, facts: dict[str, Any]) -> None:
        with (self.folder / f"{name}-{self.rank}.jsonl").open("a") as file:
            print(json.dumps(facts), file=file, flush=True)

    def terminated(self, *_: Any) -> None:
        """torchrun ends the other ranks when one has failed: they may find the cause first, unless they sleep."""
        if self.sleeping:
            self.note("error", {"text": "still late when torchrun ended it"})
            os._exit(1)

    def train(self) -> None:
        self.note("pid", {"pid": os.getpid()})
        if self.checkpoint.exists():
            state = json.loads(self.checkpoint.read_text())
            self.step = state["step"]
            self.loader.load_state_dict(state["loader"])
        self.note("start", {"step": self.step, "fault": self.fault})
        self.fault_step = self.step + FAULT_AFTER
        steps = iter(self.loader)
        while self.step < STEPS:
            if self.has_fault():
                self.fault_elsewhere()
            step = next(steps)
            refs = [ref for batch in step for ref in zip(batch.sample_ids, batch.refs, strict=True)]
            self.note("step", {"step": self.step, "index": step.index, "refs": refs})
            # The loop's own collective, in the place of the gradients'.
            sum_int64(self.groups.data, len(refs), f"step {self.step}: counting samples")
            self.step += 1
            if self.rank == 0 and self.step % SAVE_EVERY == 0:
                temporary = self.checkpoint.with_suffix(".tmp")
                temporary.write_text(json.dumps({"step": self.step, "loader": self.loader.state_dict()}))
                temporary.replace(self.checkpoint)
        self.note("done", {"step": self.step})


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = restart_store(timeout_s=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    run = Run(sys.argv[1], Path(sys.argv[2]))
    signal.signal(signal.SIGTERM, run.terminated)
    code = 0
    try:
        run.train()
    except Exception as error:
        run.note("error", {"text": f"{type(error).__name__}: {error}", "began": run.step})
        code = 1
    # gloo's threads of a broken group would wait for the other ranks.
    os._exit(code)


if __name__ == "__main__":
    main()
