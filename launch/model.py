"""A small GPT over THD packs: documents masked from each other, K/V gathered over the context-parallel group.

It is plain PyTorch on purpose, to show everything a model needs from a ``PackedBatch``. Attention runs on a dense
mask, which costs memory quadratic in the pack; real models hand ``cu_seqlens_padded`` to a varlen kernel instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tdp_megatron.ops import cp_partition_indices
from tdp_megatron.types import PackedBatch

__all__ = ["GPT", "AttentionContext", "GPTConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int = 128
    num_layers: int = 4
    num_attention_heads: int = 4
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_attention_heads "
                f"({self.num_attention_heads}): rotary embeddings rotate pairs of channels of each head"
            )


class _GatherKeysValues(torch.autograd.Function):
    """K and V of every rank of a group; backward returns to each rank the sum of what all ranks sent for its own."""

    # Lists of tensors, because the calls that take one tensor have other names before and after torch 2.13.
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size(), *local.shape))
        dist.all_gather(list(gathered.unbind()), local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        own = torch.empty_like(grad[0])
        dist.reduce_scatter(own, list(grad.unbind()), group=ctx.group)
        return own, None


class AttentionContext:
    """What every layer needs to know about a pack, computed once per microbatch.

    Args:
        batch: The pack.
        config: Sizes of the model.

    Raises:
        ValueError: The pack is shared by several ranks but has no process group, or its lengths do not add up.
    """

    def __init__(self, batch: PackedBatch, config: GPTConfig) -> None:
        cp_size = batch.local_cp_size
        if cp_size > 1 and (batch.cp_group is None or batch.cp_group.size() != cp_size):
            raise ValueError(
                f"the pack is shared by {cp_size} ranks but its cp_group is {batch.cp_group}: "
                "give Reroute the groups made by DpCpGroups.create"
            )
        self.cp_group = batch.cp_group if cp_size > 1 else None
        total = batch.num_tokens * cp_size
        bounds = batch.cu_seqlens_padded.long()
        if int(bounds[-1]) < total:
            bounds = torch.cat([bounds, bounds.new_tensor([total])])
        if int(bounds[-1]) != total:
            raise ValueError(f"cu_seqlens_padded ends at {int(bounds[-1])} but the pack has {total} tokens")

        # Keys arrive rank by rank, so their positions are listed rank by rank too.
        key_positions = torch.cat([cp_partition_indices(bounds, cp_size, rank) for rank in range(cp_size)])
        query_positions = key_positions.view(cp_size, -1)[batch.cp_rank]
        key_documents = torch.searchsorted(bounds, key_positions, right=True)
        query_documents = key_documents.view(cp_size, -1)[batch.cp_rank]
        same_document = query_documents[:, None] == key_documents[None, :]
        causal = query_positions[:, None] >= key_positions[None, :]
        # Pads form sequences of their own or end one, so each row sees at least itself and softmax stays finite.
        self.mask = same_document & causal

        channels = config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, channels, 2, device=batch.tokens.device) / channels
        angles = batch.position_ids.float()[:, None] * config.rotary_base**-exponent
        self.cos, self.sin = angles.cos(), angles.sin()

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary position embedding of [heads, T, channels]."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return rotated.to(x.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of this rank's queries to the pack's keys, all [heads, T, channels]."""
        if self.cp_group is not None:
            gathered: Tensor = _GatherKeysValues.apply(  # type: ignore[no-untyped-call]
                torch.stack([key, value]), self.cp_group
            )
            key, value = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)
        attended: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        return attended


class _Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        hidden = config.hidden_size
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp_in = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        num_tokens, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(num_tokens, 3, self.num_attention_heads, -1)
        query, key, value = qkv.permute(1, 2, 0, 3)
        attended = context.attend(context.rotate(query), context.rotate(key), value)
        x = x + self.attention_out(attended.transpose(0, 1).reshape(num_tokens, hidden))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm blocks, rotary positions, output weights shared with the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        # Layers that write to the residual stream start smaller, so that its variance does not grow with depth.
        residual_std = 0.02 / (2 * config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def logits(self, batch: PackedBatch) -> Tensor:
        """Scores of the next token, [T, vocab_size], for this rank's tokens."""
        context = AttentionContext(batch, self.config)
        x = self.embedding(batch.tokens)
        for block in self.blocks:
            x = block(x, context)
        return F.linear(self.final_norm(x), self.embedding.weight)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Sum of the loss over this rank's tokens that count; divide by the tokens of the global batch.

        Args:
            batch: The pack; every rank of its CP group must call this for the same pack.

        Returns:
            float32 [], 0 for a dummy pack, with a graph through every parameter either way.
        """
        losses = F.cross_entropy(self.logits(batch).float(), batch.labels, reduction="none")
        return (losses * batch.loss_mask).sum()
