"""How many samples a training run takes of each split, with Megatron's arithmetic."""

from __future__ import annotations

__all__ = ["data_parallel_size", "global_batch_size", "target_sizes"]


def data_parallel_size(world_size: int, *, tensor: int = 1, pipeline: int = 1, context: int = 1) -> int:
    """Data-parallel ranks of a job.

    Raises:
        ValueError: a size is not positive, or the ranks cannot be divided.
    """
    for name, size in (
        ("world size", world_size),
        ("tensor-parallel size", tensor),
        ("pipeline-parallel size", pipeline),
        ("context-parallel size", context),
    ):
        if size < 1:
            raise ValueError(f"the {name} must be at least 1, got {size}")
    model = tensor * pipeline * context
    if world_size % model:
        raise ValueError(
            f"world size {world_size} is not a multiple of {model}, the tensor x pipeline x context-parallel size"
        )
    return world_size // model


def global_batch_size(given: int | None, micro_batch_size: int | None, dp_size: int) -> int:
    """Samples of one step: as given, or one microbatch per data-parallel rank.

    Raises:
        ValueError: neither is given, one is not positive, or they cannot be divided.
    """
    for name, size in (("--global-batch-size", given), ("--micro-batch-size", micro_batch_size)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if given is None:
        if micro_batch_size is None:
            raise ValueError("the global batch size is unknown; give --global-batch-size, or --micro-batch-size")
        return micro_batch_size * dp_size
    step = dp_size * (micro_batch_size or 1)
    if given % step:
        below, above = given // step * step, (given // step + 1) * step
        nearest = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"--global-batch-size {given} is not a multiple of {step}, the microbatches of all data-parallel ranks; "
            f"the nearest are {nearest}"
        )
    return given


def target_sizes(
    global_batch_size: int,
    *,
    train_samples: int | None,
    train_iters: int | None,
    eval_interval: int,
    eval_iters: int,
    full_validation: bool = False,
) -> tuple[int, int | None, int]:
    """Samples that a run needs of train, valid and test at least.

    Args:
        global_batch_size: samples of one step.
        train_samples: samples to train on; it decides when given.
        train_iters: steps to train.
        eval_interval: steps between validations.
        eval_iters: steps of one validation, and of the test.
        full_validation: whether each validation runs over all of its data.

    Returns:
        (train, valid, test); valid None under ``full_validation``.

    Raises:
        ValueError: neither length of the run is given, or a number is out of range.
    """
    if (train_samples is None) == (train_iters is None):
        raise ValueError("the length of the run is given by --train-samples or by --train-iters, one of them")
    for name, value, least in (
        ("--train-samples", train_samples, 1),
        ("--train-iters", train_iters, 1),
        ("--eval-interval", eval_interval, 1),
        ("--eval-iters", eval_iters, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if train_iters is None:
        assert train_samples is not None
        train_iters = train_samples // global_batch_size
    if train_samples is None:
        train_samples = train_iters * global_batch_size
    valid = (train_iters // eval_interval + 1) * eval_iters * global_batch_size
    return train_samples, None if full_validation else valid, eval_iters * global_batch_size
