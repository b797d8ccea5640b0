"""A transformer block to time: attention and a gated MLP, forward and backward."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional

from tdp_megatron.errors import TdpError

__all__ = ["Block", "BlockShape", "device_name"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Dimensions of the block on one tensor-parallel rank."""

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Heads of K and V."""
    kv_channels: int
    """Dimension of each head."""
    ffn_hidden_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is no multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )

    @staticmethod
    def of(
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None,
        kv_channels: int | None,
        ffn_hidden_size: int | None,
    ) -> BlockShape:
        """The shape, with the usual values for what is None."""
        if num_attention_heads < 1:
            raise ValueError(f"--num-attention-heads must be at least 1, got {num_attention_heads}")
        return BlockShape(
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads,
            num_query_groups=num_attention_heads if num_query_groups is None else num_query_groups,
            kv_channels=hidden_size // num_attention_heads if kv_channels is None else kv_channels,
            ffn_hidden_size=7 * hidden_size // 2 if ffn_hidden_size is None else ffn_hidden_size,
        )

    def describe(self) -> dict[str, int]:
        """The numbers by name."""
        return asdict(self)


class _Layer(torch.nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = (n * shape.kv_channels for n in (shape.num_attention_heads, shape.num_query_groups))
        self.qkv = torch.nn.Linear(shape.hidden_size, wide + 2 * narrow, bias=False)
        self.out = torch.nn.Linear(wide, shape.hidden_size, bias=False)
        self.up = torch.nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False)
        self.down = torch.nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(shape.hidden_size) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [count, seqlen, hidden]; every sequence attends to itself alone, as in a pack."""
        shape = self.shape
        count, seqlen, _ = x.shape
        widths = [n * shape.kv_channels for n in (shape.num_attention_heads, *[shape.num_query_groups] * 2)]
        q, k, v = (
            part.view(count, seqlen, -1, shape.kv_channels).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(widths, dim=-1)
        )
        grouped = shape.num_query_groups != shape.num_attention_heads
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.out(attended.transpose(1, 2).reshape(count, seqlen, -1))
        gate, value = self.up(self.norms[1](x)).chunk(2, dim=-1)
        y: torch.Tensor = x + self.down(functional.silu(gate) * value)
        return y


@dataclass(slots=True)
class Block:
    """The block on a device, ready to be timed."""

    layer: torch.nn.Module
    shape: BlockShape
    device: torch.device
    dtype_name: str

    @staticmethod
    def on(shape: BlockShape, device: str | None, dtype: str | None) -> Block:
        """The block with random weights.

        Raises:
            TdpError: there is no such device.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise TdpError("--device cuda: torch sees no CUDA device; install a CUDA build of torch, or --device cpu")
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        name = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
        torch.manual_seed(0)
        return Block(_Layer(shape).to(chosen, _DTYPES[name]), shape, chosen, name)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.shape.num_query_groups * self.shape.kv_channels * _DTYPES[self.dtype_name].itemsize

    def seconds(self, seqlen: int, count: int, repeats: int) -> list[float]:
        """How long forward and backward of ``count`` sequences of ``seqlen`` tokens take, after one that warms up."""
        x = torch.randn(
            count,
            seqlen,
            self.shape.hidden_size,
            device=self.device,
            dtype=_DTYPES[self.dtype_name],
            requires_grad=True,
        )
        gradient = torch.ones_like(x)
        taken = []
        for number in range(repeats + 1):
            self.layer.zero_grad(set_to_none=True)
            x.grad = None
            self._wait()
            started = time.perf_counter()
            self.layer(x).backward(gradient)
            self._wait()
            if number:
                taken.append(time.perf_counter() - started)
        return taken

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def device_name(device: torch.device) -> dict[str, Any]:
    """What was measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"name": name, "torch": str(torch.__version__), "threads": torch.get_num_threads()}
