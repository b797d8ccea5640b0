"""Train a small GPT under torchrun from Blend -> Pack -> Reroute, with checkpoints any number of ranks can resume.

    torchrun --standalone --nproc-per-node 4 launch/train_gpt.py --cp 2 --data code --data prose --vocab-size 4096

The same script runs on CPU (gloo) and CUDA (NCCL). SIGINT and SIGTERM finish the step, save and exit with 0.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkpoint import Checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from data_graph import cost_model, parallel_layout, training_steps
from live_view import LiveView
from model import GPT, GPTConfig
from options import TrainOptions, parse_options
from run_log import RunLog, next_attempt
from runtime import EXPECTED_ERRORS, Runtime, SetupError, StopSignal, describe, start_runtime, vocab_size_of
from tdp_megatron.distributed import DpCpGroups
from tdp_megatron.nodes import Loader
from tdp_megatron.schedule import imbalance
from tdp_megatron.types import Step
from training import build_optimizer, learning_rate, train_step, warm_up


@dataclass(kw_only=True)
class _Trainer:
    """What training needs between steps."""

    options: TrainOptions
    runtime: Runtime
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loader: Loader[Step]
    groups: DpCpGroups
    view: LiveView
    steps_taken: int = 0

    def say(self, text: str) -> None:
        if self.runtime.rank == 0:
            self.view.say(text)

    def save(self) -> None:
        rng_states = {"cpu": self.runtime.gather_tensor(torch.get_rng_state())}
        if self.runtime.device.type == "cuda":
            rng_states["cuda"] = self.runtime.gather_tensor(torch.cuda.get_rng_state())
        if self.runtime.rank == 0:
            module: GPT = self.model.module
            checkpoint = Checkpoint(
                step=self.steps_taken,
                loader=self.loader.state_dict(),
                reroute=self.options.reroute,
                model_sizes=dataclasses.asdict(module.config),
                model=module.state_dict(),
                optimizer=self.optimizer.state_dict(),
                rng_states=rng_states,
            )
            self.say(f"saved {save_checkpoint(self.options.output / 'checkpoints', checkpoint)}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint stands."""
        self.model.module.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.loader.load_state_dict(checkpoint.loader)
        self.steps_taken = checkpoint.step
        # Generators belong to ranks; on another number of ranks the freshly seeded ones stay.
        for kind, states in checkpoint.rng_states.items():
            if len(states) == self.runtime.world_size and kind in ("cpu", self.runtime.device.type):
                setter = torch.set_rng_state if kind == "cpu" else torch.cuda.set_rng_state
                # torch reads the state of a view from the start of its storage.
                setter(states[self.runtime.rank].clone())

    def run_step(self, step: Step, wait_s: float, began: float, stop: StopSignal) -> tuple[dict[str, Any], bool]:
        """Train on one global batch.

        Args:
            step: This rank's share.
            wait_s: Seconds this rank waited for it.
            began: When the wait began, ``time.perf_counter`` seconds.
            stop: The signal to stop; when it came on one rank, all ranks stop after this step.

        Returns:
            The metrics of the step, and whether to stop.
        """
        options = self.options
        largest = max(int(batch.tokens.max()) for batch in step)
        if largest >= options.vocab_size:
            # A GPU would only report a device-side assertion, some kernels later.
            raise ValueError(
                f"the data has token id {largest}, the vocabulary {options.vocab_size} ids; "
                "give the tokenizer the data was made with"
            )
        lr = learning_rate(self.steps_taken, options.steps, options.lr_warmup_steps, options.lr, options.min_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss_sum, norm = train_step(
            self.model,
            self.optimizer,
            step,
            num_ranks=self.runtime.world_size,
            device=self.runtime.device,
            clip_grad=options.clip_grad,
        )
        held = sum(batch.num_tokens for batch in step)
        of_ranks = self.runtime.gather([loss_sum.item(), wait_s, held, step.num_microbatches, float(bool(stop.name))])
        seconds = time.perf_counter() - began
        self.steps_taken += 1
        metrics = {
            "step": self.steps_taken,
            "loss": of_ranks[:, 0].sum().item() / max(step.num_loss_tokens_global, 1),
            "lr": lr,
            "grad_norm": norm.item(),
            "seconds": seconds,
            "tokens": step.seqlen_sum,
            "tokens_per_s": step.seqlen_sum / seconds,
            "data_wait_s": of_ranks[:, 1].mean().item(),
            "data_wait_max_s": of_ranks[:, 1].max().item(),
            "imbalance": imbalance(step.plan, cost_model(options)),
            "padding": 1.0 - step.seqlen_sum / of_ranks[:, 2].sum().item(),
            "num_microbatches": of_ranks[:, 3].int().tolist(),
            "num_samples": step.num_samples_global,
            "source_counts": {str(k): int(v) for k, v in step.source_counts.items()},
        }
        return metrics, bool(of_ranks[:, 4].any())


def _timed(steps: Iterator[Step]) -> Iterator[tuple[Step, float, float]]:
    """Each step with the seconds waited for it and the moment the wait began."""
    while True:
        began = time.perf_counter()
        try:
            step = next(steps)
        except StopIteration:
            return
        yield step, time.perf_counter() - began, began


def _describe(metrics: dict[str, Any], steps: int) -> str:
    counts = metrics["num_microbatches"]
    microbatches = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)}-{max(counts)}"
    return (
        f"step {metrics['step']:>5}/{steps}  loss {metrics['loss']:.4f}  {metrics['tokens_per_s']:>8,.0f} tokens/s  "
        f"waited {metrics['data_wait_s']:.3f} s  imbalance {metrics['imbalance']:.3f}  "
        f"padding {metrics['padding']:.2%}  microbatches {microbatches}  lr {metrics['lr']:.1e}"
    )


def _train(trainer: _Trainer, steps: Iterator[Step], log: RunLog, stop: StopSignal) -> None:
    options = trainer.options
    saved_at = trainer.steps_taken
    why = "the data has ended"
    for step, wait_s, began in _timed(steps):
        metrics, stopping = trainer.run_step(step, wait_s, began, stop)
        log.write_refs(trainer.steps_taken - 1, step)
        log.write_metrics(metrics)
        trainer.say(_describe(metrics, options.steps))
        if trainer.view.is_live:
            trainer.view.update(trainer.loader.stats())
        done = trainer.steps_taken
        if stopping:
            why = f"{stop.name or 'a signal on another rank'} asked to stop"
        elif done >= options.steps:
            why = "training is complete"
        elif options.exit_interval and done % options.exit_interval == 0:
            why = f"--exit-interval {options.exit_interval} asks to stop here"
        else:
            if options.save_interval and done % options.save_interval == 0:
                trainer.save()
                saved_at = done
            continue
        break
    if saved_at < trainer.steps_taken:
        trainer.save()
    trainer.say(f"stopped after {trainer.steps_taken} of {options.steps} steps: {why}")


def _set_up(options: TrainOptions, runtime: Runtime) -> tuple[_Trainer, Iterator[Step]]:
    """Everything before the first step. What can fail on one rank alone happens inside ``together``."""
    torch.manual_seed(options.seed + runtime.rank)
    groups = DpCpGroups.create(parallel_layout(options), timeout_s=options.deadline)

    def alone() -> tuple[TrainOptions, GPT, Loader[Step], Checkpoint | None]:
        sized = options
        if options.tokenizer is not None and not options.vocab_size:
            sized = dataclasses.replace(options, vocab_size=vocab_size_of(options.tokenizer))
        config = GPTConfig(
            vocab_size=sized.vocab_size,
            hidden_size=sized.hidden_size,
            num_layers=sized.num_layers,
            num_attention_heads=sized.num_attention_heads,
        )
        path = find_checkpoint(sized.resume, sized.output / "checkpoints")
        checkpoint = load_checkpoint(path, dataclasses.asdict(config)) if path is not None else None
        if checkpoint is not None and checkpoint.reroute != sized.reroute:
            raise ValueError(
                f"{path} was saved with --reroute {checkpoint.reroute}, this run has --reroute {sized.reroute}; "
                f"go on with --reroute {checkpoint.reroute}"
            )
        loader: Loader[Step] = Loader(training_steps(sized, groups))
        return sized, GPT(config).to(runtime.device), loader, checkpoint

    options, model, loader, checkpoint = runtime.together("setup", alone)
    found = runtime.gather([checkpoint.step if checkpoint else -1.0])[:, 0].int().tolist()
    if len(set(found)) > 1:
        raise SetupError(
            f"the ranks found checkpoints of different steps: {found} (-1 is none); "
            "--output must be on a file system that all nodes share"
        )
    ddp = DistributedDataParallel(
        model,
        device_ids=[runtime.device.index] if runtime.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    warm_up(ddp, runtime.device)
    optimizer = build_optimizer(model, options.lr, options.weight_decay)
    view = LiveView(options.live and runtime.rank == 0)
    trainer = _Trainer(
        options=options, runtime=runtime, model=ddp, optimizer=optimizer, loader=loader, groups=groups, view=view
    )
    if checkpoint is not None:
        trainer.restore(checkpoint)
    parameters = sum(p.numel() for p in model.parameters())
    ranks = f"{runtime.world_size} rank{'s' * (runtime.world_size > 1)}"
    trainer.say(
        f"{ranks} on {runtime.device.type} (DP {options.dp} x CP {options.cp}), {parameters:,} parameters, "
        f"{options.global_batch_size} samples per step, from step {trainer.steps_taken}"
    )
    return trainer, runtime.together("data", lambda: iter(loader))


def _run(options: TrainOptions, runtime: Runtime, stop: StopSignal) -> None:
    trainer, steps = _set_up(options, runtime)
    if trainer.steps_taken >= options.steps:
        trainer.say(f"nothing to do: {trainer.steps_taken} of {options.steps} steps are taken already")
        return
    # Rank 0 counts for all: another rank may already see the folder that it makes.
    attempt = int(runtime.gather([float(next_attempt(options.output))])[0, 0])
    facts = {
        "options": trainer.options.to_json(),
        "start_step": trainer.steps_taken,
        "device": runtime.device.type,
        "torch": torch.__version__,
    }
    folder = options.output / f"attempt-{attempt:03d}"
    with runtime.together("log", lambda: RunLog(folder, runtime.rank, facts)) as log, trainer.view:
        _train(trainer, steps, log, stop)
    trainer.groups.close()  # or the ranks that end a little later would miss this one


def main(arguments: Sequence[str] | None = None) -> int:
    """Train.

    Returns:
        0 when training is complete or was asked to stop, 2 when it could not start, 1 when it failed.
    """
    try:
        options = parse_options(arguments, int(os.environ.get("WORLD_SIZE", "1")))
        runtime = start_runtime(options.device, options.deadline)
    except EXPECTED_ERRORS as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {describe(error)}", file=sys.stderr, flush=True)
        return 2
    stop = StopSignal()
    try:
        _run(options, runtime, stop)
    except Exception as error:
        runtime.report(error)
        return 2 if isinstance(error, SetupError) else 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Read-ahead threads may be inside a collective that the other ranks, already gone, never join.
    os._exit(code)
