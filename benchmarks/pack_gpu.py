"""How long does it take to pack one rank's share of a global batch, on a GPU or on the CPU?

Four ways, with the same samples and packs:

* ``pack``: ours. Raw tokens in, everything out in one pass (on a GPU one launch) for all packs.
* ``reference``: ours in plain torch operations.
* ``per_pack``: the usual sequence of torch operations, pack by pack: concatenate each key of the samples (which have
  their labels, loss mask, positions and padding already), add up lengths, make the padding mask, take the CP slice.
* ``memcpy``: a copy that moves as many bytes as ``pack`` reads and writes.

    python benchmarks/pack_gpu.py [--device cuda] [--tokens 65536 4194304] [--cp 1 4] [--json FILE] [--smoke]

Times are medians. On a GPU they are of the device's clock; "host" is what the call costs the calling thread. The bars
for a GPU: 1.3x of memcpy from 4M tokens on, 10 us at 64K tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdp_megatron.ops import PackMetadata, build_pack_table, cp_partition_indices, gather_pack
from tdp_megatron.schedule import Plan, PlanOp
from tdp_megatron.types import ParallelLayout

PACK_TOKENS = 16_384
#: tokens, labels, positions int64; loss mask float32; document id int32; padding mask bool.
BYTES_OUT = 8 + 8 + 8 + 4 + 4 + 1
Timer = Callable[[Callable[[], Any]], tuple[float, float]]


def make_plan(num_tokens: int, cp: int, seed: int) -> Plan:
    """Chat-like lengths (lognormal, median 600) in packs of 16K tokens per rank, ``num_tokens`` of them per rank."""
    layout = ParallelLayout(1, cp, PACK_TOKENS)
    rng = np.random.default_rng(seed)
    packs = max(num_tokens // PACK_TOKENS, 1)
    capacity = min(PACK_TOKENS, num_tokens) * cp
    seqlens: list[int] = []
    ops: list[PlanOp] = []
    for _ in range(packs):
        ids: list[int] = []
        used = 0
        while True:
            n = int(np.clip(rng.lognormal(np.log(600), 1.0), 1, 8192))
            padded = layout.padded_seqlen(n, cp)
            if used + padded > capacity:
                break
            ids.append(len(seqlens))
            seqlens.append(n)
            used += padded
        ops.append(PlanOp(0, cp, tuple(ids)))
    return Plan.from_ops(layout, np.array(seqlens, dtype=np.int64), ops)


def cpu_timer(repeat: int) -> Timer:
    def measure(run: Callable[[], Any]) -> tuple[float, float]:
        run()
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times), statistics.median(times)

    return measure


def cuda_timer(repeat: int) -> Timer:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def measure(run: Callable[[], Any]) -> tuple[float, float]:
        for _ in range(5):
            run()
        device, host = [], []
        for _ in range(repeat):
            flush.zero_()  # a training step leaves nothing of the tokens in the cache
            torch.cuda._sleep(1_000_000)  # the launches queue behind this, so their latency does not count
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            clock = time.perf_counter()
            run()
            host.append(time.perf_counter() - clock)
            end.record()
            torch.cuda.synchronize()
            device.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(device), statistics.median(host)

    return measure


def per_pack(
    plan: Plan, padded: dict[str, torch.Tensor], offsets: list[int], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Packs of CP rank 0, from padded samples that have all keys."""
    packs = []
    for op in plan.ops:
        widths = list(op.padded_lengths)
        pack: dict[str, torch.Tensor] = {}
        for key, flat in padded.items():
            pack[key] = torch.cat(
                [flat[offsets[i] : offsets[i] + w] for i, w in zip(op.sample_ids, widths, strict=True)]
            )
        real = torch.tensor([int(plan.seqlens[i]) for i in op.sample_ids], dtype=torch.int32, device=device)
        wide = torch.tensor(widths, dtype=torch.int32, device=device)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        cu = torch.cat([zero, wide.cumsum(0, dtype=torch.int32)])
        pack["cu_seqlens"] = torch.cat([zero, real.cumsum(0, dtype=torch.int32)])
        pack["padding_mask"] = pack["position_ids"] >= real.repeat_interleave(wide, output_size=sum(widths))
        if op.cp_size > 1:
            mine = cp_partition_indices(cu, op.cp_size, 0, total_tokens=sum(widths))
            for key in (*padded, "padding_mask"):
                pack[key] = pack[key].index_select(0, mine)
        packs.append(pack)
    return packs


def measure(num_tokens: int, cp: int, dtype: torch.dtype, device: torch.device, timer: Timer) -> dict[str, Any]:
    plan = make_plan(num_tokens, cp, seed=num_tokens + cp)
    table = build_pack_table(plan, 0)
    stored = plan.seqlens + 1
    starts = np.cumsum(stored) - stored
    tokens = torch.randint(0, 30_000, (int(stored.sum()),)).numpy().astype(str(dtype).removeprefix("torch."))
    sources = {"tokens": torch.from_numpy(tokens).to(device)}
    first = np.where(table.lengths > 0, starts[np.maximum(table.sample_ids, 0)] + table.starts, 0)
    metadata = PackMetadata.build(plan, table, first, extra_token=True).to(device)
    out = gather_pack(sources, metadata)
    size = metadata.num_tokens

    widths = np.zeros(len(plan.seqlens), dtype=np.int64)
    for op in plan.ops:
        widths[list(op.sample_ids)] = op.padded_lengths
    offsets = np.cumsum(widths) - widths
    total = int(widths.sum())
    positions = torch.from_numpy(np.arange(total) - np.repeat(offsets, widths)).to(device)
    padded = {
        "tokens": torch.zeros(total, dtype=torch.int64, device=device),
        "labels": torch.zeros(total, dtype=torch.int64, device=device),
        "loss_mask": torch.ones(total, device=device),
        "position_ids": positions,
    }
    moved = size * BYTES_OUT + size * sources["tokens"].element_size()
    block = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)

    ways: dict[str, Callable[[], Any]] = {
        "pack": lambda: gather_pack(sources, metadata, out=out),
        "reference": lambda: gather_pack(sources, metadata, out=out, backend="reference"),
        "per_pack": lambda: per_pack(plan, padded, offsets.tolist(), device),
        "memcpy": lambda: target.copy_(block),
    }
    seconds = {name: timer(run) for name, run in ways.items()}
    ours = seconds["pack"][0]
    return {
        "tokens": size,
        "packs": plan.num_ops,
        "sequences": len(plan.seqlens),
        "cp": cp,
        "dtype": str(dtype).removeprefix("torch."),
        "us": {name: round(device_time * 1e6, 2) for name, (device_time, _) in seconds.items()},
        "host_us": {name: round(host_time * 1e6, 2) for name, (_, host_time) in seconds.items()},
        "gigabytes_per_second": round(moved / ours / 1e9, 1),
        "times_memcpy": round(ours / seconds["memcpy"][0], 2),
        "faster_than_per_pack": round(seconds["per_pack"][0] / ours, 1),
        "faster_than_reference": round(seconds["reference"][0] / ours, 1),
    }


def machine(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if device.type == "cuda":
        import triton

        return {"device": torch.cuda.get_device_name(device), "triton": triton.__version__, **found}
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    processor = names[0].split(":")[1].strip() if names else platform.machine()
    return {"device": f"{processor}, {torch.get_num_threads()} thread(s)", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 1 << 20, 4 << 20])
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.tokens, options.repeat = [32_768], 3
    device = torch.device(options.device)
    timer = cuda_timer(options.repeat) if device.type == "cuda" else cpu_timer(options.repeat)
    report: dict[str, Any] = {"machine": machine(device), "results": []}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    header = f"{'tokens':>9} {'cp':>3} {'dtype':>7} {'pack us':>10} {'host us':>9} {'GB/s':>7} {'x memcpy':>9}"
    print(f"{header} {'per_pack':>10} {'reference':>10}")
    for num_tokens in options.tokens:
        for cp in options.cp:
            for dtype in (torch.uint16, torch.int32):
                row = measure(num_tokens, cp, dtype, device, timer)
                report["results"].append(row)
                print(
                    f"{row['tokens']:>9} {cp:>3} {row['dtype']:>7} {row['us']['pack']:>10} {row['host_us']['pack']:>9} "
                    f"{row['gigabytes_per_second']:>7} {row['times_memcpy']:>9} {row['faster_than_per_pack']:>9}x "
                    f"{row['faster_than_reference']:>9}x"
                )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
