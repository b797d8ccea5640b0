"""Compiles every specialisation of the kernels for GPUs that need not be here; prints one JSON line per binary.

Run in a process of its own, without TRITON_INTERPRET: ``python compile_kernels.py TARGET [MAX_REGISTERS]`` with a
target such as 90 or gfx942. With MAX_REGISTERS only the largest kernel is compiled, with so few that it must spill.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tdp_megatron.ops import triton_pack

TOKENS = {"uint8": "*u8", "int8": "*i8", "int16": "*i16", "uint16": "*u16", "int32": "*i32", "int64": "*i64"}
#: User keys travel as integers of their size.
KEYS = ("*u8", "*i16", "*i32", "*i64")


def pack_signature(tokens: str, *, given: bool, edges: bool, keys: tuple[str, ...]) -> dict[str, Any]:
    optional = {
        "labels": "*i64" if given else None,
        "loss_mask": "*fp32" if given else None,
        "position_ids": "*i64" if given else None,
    }
    return {
        "tokens": TOKENS[tokens],
        **optional,
        "extras": keys,
        "rows": "*i64",
        "loss_edges": "*i64" if edges else None,
        "capacity": "i32",
        "out_tokens": "*i64",
        "out_labels": "*i64",
        "out_loss_mask": "*fp32",
        "out_position_ids": "*i64",
        "out_padding_mask": "*i1",
        "out_document_id": "*i32",
        "out_extras": keys,
        "num_tokens": "i32",
        "pad_token": "i32",
        "pad_label": "i32",
    }


def specialisations(thorough: bool) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Name -> kernel, signature, constants."""
    found: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    constants = {"IGNORE": -100, "ZERO_PAD_POSITIONS": False, "BLOCK": triton_pack.BLOCK}
    for tokens in TOKENS if thorough else ("uint16", "int32", "int64"):
        for name, options in {
            "derived": {"given": False, "edges": False, "keys": ()},
            "turns": {"given": False, "edges": True, "keys": ()},
            "given": {"given": True, "edges": False, "keys": ()},
            "keys": {"given": False, "edges": True, "keys": KEYS},
        }.items():
            found[f"pack {tokens} {name}"] = (triton_pack.pack_kernel, pack_signature(tokens, **options), constants)
    big_pads = pack_signature("uint16", given=False, edges=False, keys=())
    found["pack uint16 derived, pads of 64 bits"] = (
        triton_pack.pack_kernel,
        {**big_pads, "pad_token": "i64", "pad_label": "i64"},
        constants,
    )
    zero = {**constants, "ZERO_PAD_POSITIONS": True}
    found["pack uint16 given, zeros at pads"] = (
        triton_pack.pack_kernel,
        pack_signature("uint16", given=True, edges=False, keys=KEYS),
        zero,
    )
    wide = {"rows": "*i64", "capacity": "i32", "num_tokens": "i32", "width": "i32"}
    for bits in KEYS:
        for width in (2, 5, 4096):
            block, block_width = triton_pack.tile_of(width)
            found[f"copy_rows {bits}, {width} per token"] = (
                triton_pack.copy_rows_kernel,
                {"values": bits, "out": bits, **wide},
                {"BLOCK": block, "BLOCK_WIDTH": block_width},
            )
    for bits in ("*i32", "*i64"):
        found[f"partition {bits}"] = (
            triton_pack.partition_kernel,
            {
                "cu_seqlens": bits,
                "num_seqlens": "i32",
                "cp_size": "i32",
                "cp_rank": "i32",
                "out": "*i64",
                "num_tokens": "i32",
            },
            {"BLOCK": triton_pack.BLOCK},
        )
    return found


def compiled(
    kernel: Any, signature: dict[str, Any], constants: dict[str, Any], target: GPUTarget, **options: Any
) -> Any:
    types = {name: "constexpr" if kind is None else kind for name, kind in signature.items()}
    types.update(dict.fromkeys(constants, "constexpr"))
    order = {name: types[name] for name in kernel.arg_names}
    values = {name: None for name, kind in signature.items() if kind is None} | constants
    # What a launch finds: torch's allocations are aligned.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(order.items())
        if isinstance(kind, str) and kind.startswith("*")
    }
    source = ASTSource(kernel, order, {(kernel.arg_names.index(n),): v for n, v in values.items()}, aligned)
    return triton.compile(source, target=target, options={"num_warps": 4, **options})


def usage(binary: Any, target: GPUTarget) -> dict[str, int]:
    """Registers, and bytes of spilled ones or of a stack."""
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        number = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\b", text)}
        spilled = number["vgpr_spill_count"] + number["sgpr_spill_count"] + number["private_segment_fixed_size"]
        return {"registers": number["vgpr_count"], "spilled": spilled, "bytes": len(binary.asm["hsaco"])}
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text}")
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local, "bytes": len(binary.asm["cubin"])}


def main(name: str, max_registers: int | None) -> None:
    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name), 32)
    chosen = specialisations(thorough=name == "90")
    options: dict[str, Any] = {}
    if max_registers is not None:
        chosen = {"pack int64 keys": chosen["pack int64 keys"]}
        options = {"maxnreg": max_registers}
    for what, (kernel, signature, constants) in chosen.items():
        binary = compiled(kernel, signature, constants, target, **options)
        print(json.dumps({"target": name, "kernel": what, **usage(binary, target)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
