"""Checkpoints: a folder per step, complete or absent, and a file ``latest`` that names the last one.

    OUTPUT/checkpoints/latest                   "step-00000030"
    OUTPUT/checkpoints/step-00000030/state.json  step, loader state, layout, model sizes
    OUTPUT/checkpoints/step-00000030/model.pt, optimizer.pt, rng.pt

The loader's state is global: it says where the *global* order of samples stands, so rank 0 saves it once for all
ranks, and any number of ranks can load it.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from files import sync, write_text

__all__ = ["Checkpoint", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

FORMAT_VERSION = 1
LATEST = "latest"
_STATE_TYPES = {"step": int, "loader": dict, "reroute": str, "model_sizes": dict}
_OTHER = "give --resume another checkpoint, or none to train from the start"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped."""

    step: int
    """Optimizer steps taken."""
    loader: dict[str, Any]
    """State of the loader, the same for every rank."""
    reroute: str
    """How samples reached their ranks: the two ways have different graphs of nodes, so their states differ."""
    model_sizes: dict[str, Any]
    """What the model was built with."""
    model: dict[str, Any]
    """Parameters."""
    optimizer: dict[str, Any]
    """State of the optimizer."""
    rng_states: dict[str, torch.Tensor]
    """``cpu`` and, where there is one, ``cuda``: uint8 [ranks, bytes], the state of every rank's generator."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and make it the latest; called by one rank.

    Args:
        folder: Where checkpoints live; made if needed.
        checkpoint: What to save.

    Returns:
        The folder of this checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_by_a_killed_process in folder.glob(".step-*"):
        shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
    final = folder / f"step-{checkpoint.step:08d}"
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    replaced = folder / f".{final.name}.{os.getpid()}.old"
    try:
        temporary.mkdir()
        state = {
            "format_version": FORMAT_VERSION,
            "step": checkpoint.step,
            "loader": checkpoint.loader,
            "reroute": checkpoint.reroute,
            "model_sizes": checkpoint.model_sizes,
        }
        (temporary / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        _save_tensors(checkpoint.model, temporary / "model.pt")
        _save_tensors(checkpoint.optimizer, temporary / "optimizer.pt")
        _save_tensors(checkpoint.rng_states, temporary / "rng.pt")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        if final.exists():
            # Training went back to an earlier step and came here again; a folder can't replace a full one.
            final.rename(replaced)
        temporary.rename(final)
        sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    write_text(folder / LATEST, final.name + "\n")
    return final


def _save_tensors(value: Any, path: Path) -> None:
    try:
        torch.save(value, path)
    except RuntimeError as error:
        # torch says at which byte it is, not that the disk is full.
        free = shutil.disk_usage(path.parent).free / 1e6
        raise OSError(
            f"{path} could not be written, {free:,.1f} MB are free on its disk ({_first_line(error)}); "
            "the checkpoint before it is kept"
        ) from error


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint that ``--resume`` means.

    Args:
        resume: ``auto`` (the latest in ``folder``, if any), ``none``, or a path: of one checkpoint, of a folder of
            checkpoints, or of a run's output folder.
        folder: Where this run's checkpoints live.

    Raises:
        FileNotFoundError: The path has no checkpoint.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return _latest(folder)
    path = Path(resume)
    if (path / "state.json").is_file():
        return path
    found = _latest(path) or _latest(path / "checkpoints")
    if found is None:
        raise FileNotFoundError(f"--resume {path}: neither a checkpoint (no state.json in it) nor a folder of them")
    return found


def _latest(folder: Path) -> Path | None:
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / pointer.read_text(encoding="utf-8").strip()
        if (named / "state.json").is_file():
            return named
    complete = sorted(p for p in folder.glob("step-*") if (p / "state.json").is_file())
    return complete[-1] if complete else None


def load_checkpoint(path: Path, model_sizes: dict[str, Any]) -> Checkpoint:
    """Read a checkpoint for a model of the same sizes.

    Raises:
        ValueError: The checkpoint is damaged, or of another version or model.
        FileNotFoundError: A file is missing.
    """
    state = _read_state(path)
    for name, value in model_sizes.items():
        if state["model_sizes"].get(name) != value:
            raise ValueError(
                f"{path} holds a model of {name} {state['model_sizes'].get(name)}, this run has {value}; "
                f"give the same {name} or train from the start with --resume none"
            )
    return Checkpoint(
        step=state["step"],
        loader=state["loader"],
        reroute=state["reroute"],
        model_sizes=state["model_sizes"],
        model=_load_tensors(path / "model.pt"),
        optimizer=_load_tensors(path / "optimizer.pt"),
        rng_states=_load_tensors(path / "rng.pt"),
    )


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}; {_OTHER}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{file} is damaged: expected an object, found {type(state).__name__}; {_OTHER}")
    if state.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {state.get('format_version')}, this script reads {FORMAT_VERSION}; "
            "train from the start with --resume none"
        )
    for name, kind in _STATE_TYPES.items():
        if type(state.get(name)) is not kind:
            raise ValueError(f"{file} is damaged: {name} must be of type {kind.__name__}; {_OTHER}")
    # The loader counts its steps itself: two numbers that must agree.
    yielded = state["loader"].get("num_yielded")
    if state["step"] != yielded:
        raise ValueError(f"{file} is damaged: {state['step']} optimizer steps on {yielded} global batches; {_OTHER}")
    return state


def _load_tensors(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever the zip reader and the unpickler raise
        raise ValueError(f"{file} is damaged: {_first_line(error)}; {_OTHER}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
