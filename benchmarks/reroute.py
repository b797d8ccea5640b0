"""How much CPU time does moving one global batch to its ranks cost?

On forked gloo ranks, with the same samples and the same algorithm:

* ``megatron``: megatron-core's own rerouting, run on the CPU; left out where megatron-core is not installed.
* ``per_key``: the common way. Lengths are gathered, then one all-to-all for every key; samples are cut apart and joined
  again in Python, one by one.
* ``exchange``: ours. Lengths are gathered, then one all-to-all of bytes for all keys; native copies on both sides.
* ``plan``: ours for indexed data. Every rank reads what it trains on; nothing is sent.
* ``wire``: the limit of ``exchange``: one all-to-all of as many bytes, with nothing done before or after it.

    python benchmarks/reroute.py [--samples 1024] [--ranks 2 4 8] [--repeat 5] [--json FILE] [--smoke]

With two kinds of samples: ``text``, whose labels, loss mask and positions follow from the tokens, so that the exchange
needs to send only these; and ``any``, in which nothing follows from anything and all 28 bytes per token travel.

CPU time is that of all ranks together, the median over steps. Bytes sent are what the processes have given to write
calls, their sockets' included (/proc/self/io); what the ranks hold at the end is compared value by value.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from tdp_megatron.distributed import DpCpGroups, Exchange
from tdp_megatron.nodes import GlobalBatch, IndexedRead
from tdp_megatron.reading import read_block
from tdp_megatron.samples import block_from_items
from tdp_megatron.schedule import CostModel, Plan, schedule
from tdp_megatron.testing import run_ranks, write_corpus
from tdp_megatron.types import Int64Array, ParallelLayout

Pack: TypeAlias = dict[str, torch.Tensor]
KEYS = ("tokens", "labels", "loss_mask", "position_ids")
COST = CostModel(a=1e-5, b=1e-10)


def make_samples(seqlens: Int64Array, rank: int, world: int, content: str) -> list[Pack]:
    """This rank's share of the samples, dealt out in turn; 28 bytes per token."""
    generator = torch.Generator().manual_seed(rank)
    samples = []
    for n in seqlens[rank::world].tolist():
        document = torch.randint(0, 50_000, (n + 1,), generator=generator)
        if content == "any":
            values = {key: torch.randint(0, 1 << 40, (n,), generator=generator) for key in KEYS}
            samples.append(values | {"loss_mask": torch.rand(n, generator=generator)})
            continue
        samples.append(
            {
                "tokens": document[:-1].clone(),
                "labels": document[1:].clone(),
                "loss_mask": torch.ones(n),
                "position_ids": torch.arange(n),
            }
        )
    return samples


def gathered_lengths(mine: list[int], world: int) -> list[list[int]]:
    count = torch.tensor([len(mine)])
    counts = [torch.zeros_like(count) for _ in range(world)]
    dist.all_gather(counts, count)
    padded = torch.zeros(int(max(counts)), dtype=torch.int64)
    padded[: len(mine)] = torch.tensor(mine)
    rows = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(rows, padded)
    return [row[: int(n)].tolist() for row, n in zip(rows, counts, strict=True)]


def per_key(samples: list[Pack], rank: int, world: int, layout: ParallelLayout) -> list[Pack]:
    """One collective per key, samples handled one by one."""
    lengths = gathered_lengths([len(s["tokens"]) for s in samples], world)
    order = sorted((j, r) for r in range(world) for j in range(len(lengths[r])))
    seqlens = np.array([lengths[r][j] for j, r in order])
    plan = schedule(seqlens, layout, COST, algorithm="lpt")
    wanted = [sorted(i for op in plan.ops if r in op.ranks for i in op.sample_ids) for r in range(world)]
    send_ids = [[i for i in wanted[r] if order[i][1] == rank] for r in range(world)]
    receive_ids = [[i for i in wanted[rank] if order[i][1] == r] for r in range(world)]
    send_sizes = [sum(int(seqlens[i]) for i in ids) for ids in send_ids]
    receive_sizes = [sum(int(seqlens[i]) for i in ids) for ids in receive_ids]
    received: dict[int, dict[str, torch.Tensor]] = {i: {} for ids in receive_ids for i in ids}
    for key in KEYS:
        parts = [samples[order[i][0]][key] for ids in send_ids for i in ids]
        send = torch.cat(parts) if parts else torch.empty(0, dtype=samples[0][key].dtype)
        out = torch.empty(sum(receive_sizes), dtype=send.dtype)
        dist.all_to_all_single(out, send, receive_sizes, send_sizes)
        at = 0
        for ids in receive_ids:
            for i in ids:
                received[i][key] = out[at : at + int(seqlens[i])]
                at += int(seqlens[i])
    return joined(plan, rank, received)


def joined(plan: Plan, rank: int, received: dict[int, Pack]) -> list[Pack]:
    """The packs of this rank's samples, each key joined."""
    packs = []
    for op in plan.rank_ops(rank).tolist():
        ids = plan.ops[op].sample_ids
        if ids:
            pack = {key: torch.cat([received[i][key] for i in ids]) for key in KEYS}
            lengths = [0, *(len(received[i]["tokens"]) for i in ids)]
            packs.append(pack | {"cu_seqlens": torch.tensor(lengths).cumsum(0, dtype=torch.int32)})
    return packs


class MegatronReroute:
    """megatron-core's ``HybridCPDataLoaderWrapper``, its gathering and rerouting only, without a GPU."""

    def __init__(self, world: int) -> None:
        from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper

        # It calls .cuda() on what it sends; on a machine without GPUs the tensors stay where they are.
        torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign,assignment]
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        self._wrapper = HybridCPDataLoaderWrapper.__new__(HybridCPDataLoaderWrapper)
        self._wrapper.dp_cp_group = self._wrapper.dp_group = dist.group.WORLD
        self._wrapper.tp_group = [dist.new_group([r]) for r in range(world)][dist.get_rank()]
        self._wrapper.total_hdp_gpus = world

    def __call__(self, samples: list[Pack], rank: int, world: int, layout: ParallelLayout) -> list[Pack]:
        wrapper = self._wrapper
        lengths = torch.tensor([len(s["tokens"]) for s in samples], dtype=torch.int32)
        gathered, offsets = wrapper.get_global_seqlens(lengths)
        numbered, mine = wrapper.get_global_id_seqlens(len(lengths), offsets, gathered)
        plan = schedule(np.array(gathered), layout, COST, algorithm="lpt")
        groups = [[[i for op in plan.ops if r in op.ranks for i in op.sample_ids] for r in range(world)]]
        received = wrapper.reroute_samples_to_hdp_ranks(samples, mine, numbered, groups, offsets)
        return joined(plan, rank, received)


def exchange(samples: list[Pack], step: int, mover: Exchange, rank: int, layout: ParallelLayout) -> list[Pack]:
    """Our exchange, from the same samples to the same packs."""
    local = read_block(block_from_items(samples, 0, 0))
    known = mover.gather(step, local, 0)
    plan = schedule(known.seqlens, layout, COST, algorithm="lpt")
    batch = GlobalBatch(
        index=step,
        plan=plan,
        seqlens=known.seqlens,
        num_loss_tokens=known.num_loss_tokens,
        refs=known.refs,
        block=None,
        exchange=mover,
        samples=known,
        local=local,
    )
    return packed(batch, rank)


def packed(batch: GlobalBatch, rank: int) -> list[Pack]:
    """With a tail multiple of 1 and no CP nothing is padded but the one token of an empty pack."""
    packs = [pack for pack in batch.pack(rank) if not pack.is_dummy]
    return [{key: getattr(pack, key) for key in (*KEYS, "cu_seqlens")} for pack in packs]


def by_plan(prefix: str, rank: int, layout: ParallelLayout) -> list[Pack]:
    """Our plan mode, from files of the same lengths."""
    node = IndexedRead(prefix)
    block = node.take(1 << 40)
    plan: Plan = schedule(block.seqlens, layout, COST, algorithm="lpt")
    batch = GlobalBatch(
        index=0, plan=plan, seqlens=block.seqlens, num_loss_tokens=block.num_loss_tokens, refs=block.refs, block=block
    )
    return packed(batch, rank)


class Wire:
    """An all-to-all of as many bytes as the exchange has sent in its first step, untouched."""

    def __init__(self, mover: Exchange, world: int) -> None:
        self._mover, self._world = mover, world
        self._size = 0

    def __call__(self) -> list[Pack]:
        if not self._size:
            total = torch.tensor(self._mover.bytes_sent)
            dist.all_reduce(total)
            self._size = int(total) // max(self._world - 1, 1) // self._world * self._world
        send, received = (torch.empty(self._size, dtype=torch.uint8) for _ in range(2))
        dist.all_to_all_single(received, send)
        return []


def bytes_written() -> int:
    """What this process has given to write calls so far; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def check_equal(packs: dict[str, list[Pack]], rank: int) -> None:
    """Two ways have moved the same values to this rank; files hold other values of the same lengths."""
    for name, keys in (("exchange", (*KEYS, "cu_seqlens")), ("plan", ("cu_seqlens",))):
        pairs = zip(packs["per_key"], packs[name], strict=True)
        if not all(torch.equal(one[key], other[key]) for one, other in pairs for key in keys):
            raise AssertionError(f"rank {rank}: {name} and per_key packed different values")


def checksum(packs: list[Pack]) -> float:
    """Megatron numbers the samples in another order, so its ranks get others; all ranks together get the same."""
    return sum(float(pack[key].double().sum()) for pack in packs for key in KEYS)


def measure(
    world: int, seqlens: Int64Array, prefix: str, repeat: int, with_megatron: bool, content: str
) -> dict[str, Any]:
    """Median CPU milliseconds and bytes sent per step over all ranks, for each way."""
    limit = 1 << int(np.ceil(np.log2(max(seqlens.max(), seqlens.sum() / world / 2))))
    layout = ParallelLayout(world, 1, limit, tail_multiple=1)

    def body(rank: int, world: int) -> dict[str, tuple[list[float], int, float]]:
        samples = make_samples(seqlens, rank, world, content)
        mover = Exchange(DpCpGroups.create(layout, timeout_s=60))
        ways = {"megatron": lambda step: peer(samples, rank, world, layout)} if with_megatron else {}
        peer = MegatronReroute(world) if with_megatron else None
        wire = Wire(mover, world)
        ways |= {
            "per_key": lambda step: per_key(samples, rank, world, layout),
            "exchange": lambda step: exchange(samples, step, mover, rank, layout),
            "plan": lambda step: by_plan(prefix, rank, layout),
            "wire": lambda step: wire(),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        sent = dict.fromkeys(ways, 0)
        for step in range(repeat + 1):
            packs = {}
            for name, run in ways.items():
                dist.barrier()
                written, begin = bytes_written(), time.process_time()
                packs[name] = run(step)
                if step:  # the first round warms up
                    spent[name].append(time.process_time() - begin)
                sent[name] = bytes_written() - written
            check_equal(packs, rank)
        return {name: (spent[name], sent[name], checksum(packs[name])) for name in ways}

    results = run_ranks(body, world, timeout_s=300)
    row: dict[str, Any] = {"content": content, "ranks": world}
    for name in results[0]:
        totals = [1e3 * sum(r[name][0][i] for r in results) for i in range(repeat)]
        row[f"{name}_bytes"] = sum(r[name][1] for r in results)
        row[f"{name}_ms"] = statistics.median(totals)
        row[f"{name}_spread_ms"] = [min(totals), max(totals)]
    moved = {name: round(sum(r[name][2] for r in results), 3) for name in results[0] if name not in ("plan", "wire")}
    if not np.allclose(list(moved.values()), moved["per_key"], rtol=1e-12):
        raise AssertionError(f"the ways have moved different values: {moved}")
    for peer_name in ("megatron", "per_key"):
        for name in ("exchange", "plan"):
            if peer_name in results[0]:
                row[f"{name}_over_{peer_name}"] = row[f"{peer_name}_ms"] / row[f"{name}_ms"]
    return row


def main(arguments: list[str] | None = None) -> int:
    """Print a table; write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.samples, options.ranks, options.repeat = 64, [2], 1
    with_megatron = importlib.util.find_spec("megatron") is not None
    if with_megatron:
        import megatron.core.datasets.data_schedule  # noqa: F401 - imported once, before the ranks are forked
    rng = np.random.default_rng(0)
    seqlens = np.clip(rng.lognormal(7.0, 0.8, options.samples), 16, 16384).astype(np.int64)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(Path(folder) / "corpus", [rng.integers(0, 50_000, n) for n in seqlens])
        for content in ("text", "any"):
            for world in options.ranks:
                rows.append(measure(world, seqlens, prefix, options.repeat, with_megatron, content))
    report = {
        "benchmark": "reroute",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "samples": options.samples,
        "tokens": int(seqlens.sum()),
        "megabytes": round(28 * int(seqlens.sum()) / 1e6, 1),
        "rows": rows,
    }
    print(f"{options.samples} samples, {report['tokens']:,} tokens, {report['megabytes']} MB in four keys")
    if not with_megatron:
        print("megatron-core is not installed: compared with our plain version of one collective per key only")
    print("CPU ms of all ranks, median (lowest to highest) of a step; x: how many times less than the peer")
    for row in rows:
        print(f"{row['content']}, {row['ranks']} ranks")
        for name in ("megatron", "per_key", "exchange", "plan", "wire"):
            if f"{name}_ms" in row:
                low, high = row[f"{name}_spread_ms"]
                ratios = [
                    f"{row[f'{name}_over_{peer}']:.1f}x {peer}"
                    for peer in ("megatron", "per_key")
                    if f"{name}_over_{peer}" in row
                ]
                sent = f"{row[f'{name}_bytes'] / 1e6:.1f} MB sent"
                print(f"  {name:<9} {row[f'{name}_ms']:>7.0f} ({low:.0f} to {high:.0f})   {', '.join([sent, *ratios])}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
