"""One optimizer step over a ``Step`` of packed microbatches, and the learning rate."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tdp_megatron.types import PackedBatch, Step

__all__ = ["build_optimizer", "learning_rate", "train_step", "warm_up"]


def build_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW that decays the matrices and leaves the norms alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, warmup_steps: int, lr: float, min_lr: float) -> float:
    """Linear warm-up, then a cosine down to ``min_lr``; a function of the step alone, so nothing to save.

    Args:
        step: Steps taken before this one.
        steps: Steps of the whole training.
        warmup_steps: Steps in which the rate rises.
        lr: Largest rate.
        min_lr: Rate at the end.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * progress))


def train_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    step: Step,
    *,
    num_ranks: int,
    device: torch.device,
    clip_grad: float,
) -> tuple[Tensor, Tensor]:
    """Forward, backward and update for one global batch.

    Ranks may hold different numbers of microbatches: DDP averages gradients in the last one only, of which each rank
    has exactly one. The loss is divided by the tokens of the *global* batch, so that it does not matter which rank
    or microbatch a sample is in.

    Args:
        model: The model under DDP over all DP x CP ranks.
        optimizer: What updates it.
        step: This rank's microbatches.
        num_ranks: Ranks that DDP averages over.
        device: Where the model is.
        clip_grad: Largest gradient norm; 0 means any.

    Returns:
        Sum of this rank's losses and norm of the global gradient before clipping, float32 [] each.
    """
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), device=device)
    # DDP divides the summed gradients by the ranks; the loss wants their sum.
    scale = num_ranks / max(step.num_loss_tokens_global, 1)
    for number, batch in enumerate(step, start=1):
        batch = batch.to(device, non_blocking=True)
        last = number == step.num_microbatches
        with contextlib.nullcontext() if last else model.no_sync():
            loss = _loss(model, batch, device)
            torch.autograd.backward(loss * scale)
        loss_sum += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf)
    optimizer.step()
    return loss_sum, norm


def _loss(model: nn.Module, batch: PackedBatch, device: torch.device) -> Tensor:
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        loss: Tensor = model(batch)
    return loss


def warm_up(model: DistributedDataParallel, device: torch.device) -> None:
    """Two passes over a pack without samples, so that DDP has laid out its buckets before the first step.

    DDP does that inside the forward pass of its second synchronised microbatch, where it waits for all ranks. With
    CP sizes that vary, that microbatch may be shared with a rank for which it is not the last, and both would wait
    for each other.
    """
    num_tokens = 16
    nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    ends = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    pack = PackedBatch(
        tokens=nothing,
        labels=nothing - 100,
        loss_mask=torch.zeros(num_tokens, device=device),
        position_ids=torch.arange(num_tokens, device=device),
        padding_mask=torch.ones(num_tokens, dtype=torch.bool, device=device),
        document_id=nothing.int(),
        cu_seqlens=ends,
        cu_seqlens_padded=ends,
        max_seqlen=num_tokens,
        local_cp_size=1,
        cp_rank=0,
        first_rank=0,
        sample_ids=(),
        refs=(),
    )
    for _ in range(2):
        torch.autograd.backward(_loss(model, pack, device))
    model.zero_grad(set_to_none=True)
