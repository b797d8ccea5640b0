"""The ranks of a run: starting them, agreeing on errors, hearing the signal to stop."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from tdp_megatron.distributed import restart_store
from tdp_megatron.errors import TdpError

__all__ = ["EXPECTED_ERRORS", "Runtime", "SetupError", "StopSignal", "start_runtime", "vocab_size_of"]

Result = TypeVar("Result")

#: What a user can cause; the message says enough, a traceback would hide it.
EXPECTED_ERRORS = (TdpError, ValueError, TypeError, OSError)


class SetupError(RuntimeError):
    """Some rank could not start; the message is its."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """This process among the ranks."""

    rank: int
    """Rank among all."""
    world_size: int
    """Ranks."""
    device: torch.device
    """Where this rank computes."""
    store: Store
    """Key-value store that all ranks reach, even when collectives no longer work."""

    def gather(self, values: list[float]) -> torch.Tensor:
        """The values of every rank, float64 [ranks, values], on the CPU."""
        return self.gather_tensor(torch.tensor(values, dtype=torch.float64))

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of every rank, which have one shape, stacked on the CPU."""
        local = tensor.to(self.device)
        gathered = local.new_empty(self.world_size, *local.shape)
        dist.all_gather(list(gathered.unbind()), local)
        return gathered.cpu()

    def together(self, name: str, action: Callable[[], Result]) -> Result:
        """Do something on every rank; when it fails on some, fail on all with the message of the first that failed.

        Raises:
            SetupError: The action failed on some rank.
        """
        result: Result | None = None
        message = ""
        try:
            result = action()
        except EXPECTED_ERRORS as error:
            message = describe(error)
            self.store.set(f"{name}/{self.rank}", message)
        failed = self.gather([float(bool(message))])[:, 0].nonzero().flatten().tolist()
        if failed:
            first = self.store.get(f"{name}/{failed[0]}").decode()
            where = "" if len(failed) == self.world_size else f"rank {failed[0]}: "
            raise SetupError(where + first)
        assert result is not None
        return result

    def report(self, error: BaseException) -> None:
        """Say once, not on every rank, what went wrong."""
        first = self.store.add("errors", 1) == 1
        if isinstance(error, (*EXPECTED_ERRORS, SetupError)):
            if first:
                print(f"error: {describe(error)}", file=sys.stderr, flush=True)
        elif first:
            traceback.print_exception(error)
        else:
            print(f"rank {self.rank} stopped too: {describe(error)}", file=sys.stderr, flush=True)


def describe(error: BaseException) -> str:
    """One line about an error."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, (ValueError, SetupError)) else f"{type(error).__name__}: {text}"


def start_runtime(device: str, timeout_s: float) -> Runtime:
    """Join the ranks that torchrun started, or be the only one without torchrun.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where each rank of this machine can have a device.
        timeout_s: Seconds until a collective that some rank does not reach becomes an error.

    Raises:
        ValueError: CUDA is wanted but there are fewer devices than ranks.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count()
    if device == "cuda" and devices < local_ranks:
        raise ValueError(f"--device cuda: {local_ranks} ranks here but {devices} CUDA devices; use --device cpu")
    use_cuda = devices >= local_ranks if device == "auto" else device == "cuda"
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    own_device = torch.device("cpu")
    if use_cuda:
        own_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own_device)
    timeout = timedelta(seconds=timeout_s)
    store: Store
    if "RANK" in os.environ:
        store = restart_store(timeout_s)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=PrefixStore("default", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=own_device if use_cuda else None,
    )
    return Runtime(rank=rank, world_size=world_size, device=own_device, store=PrefixStore("train", store))


class StopSignal:
    """Whether SIGINT or SIGTERM came; the step under way is finished and saved first."""

    def __init__(self) -> None:
        self.name = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name


def vocab_size_of(tokenizer: os.PathLike[str]) -> int:
    """Token ids of a ``tokenizer.json``.

    Raises:
        ValueError: The file is no tokenizer, or the tokenizers package is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("--tokenizer needs the tokenizers package; install it or give --vocab-size") from None
    try:
        # The package raises plain Exception for a file it can't read.
        return int(Tokenizer.from_file(os.fspath(tokenizer)).get_vocab_size(with_added_tokens=True))
    except Exception as error:
        raise ValueError(f"--tokenizer {tokenizer}: not a tokenizer.json ({error})") from None
