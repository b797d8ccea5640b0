"""Checkpoints of the training script: complete or absent, found again, refused when they belong to another model."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import checkpoint as checkpoints
from checkpoint import Checkpoint, find_checkpoint, load_checkpoint, save_checkpoint

SIZES = {"vocab_size": 8, "hidden_size": 4}


def make_checkpoint(step: int, value: float = 1.0) -> Checkpoint:
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return Checkpoint(
        step=step,
        loader={"root": {"position": step * 32}, "num_yielded": step},
        reroute="plan",
        model_sizes=SIZES,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        rng_states={"cpu": torch.arange(10, dtype=torch.uint8).view(2, 5)},
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = make_checkpoint(30)
    path = save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(path, SIZES)
    assert (loaded.step, loaded.loader, loaded.reroute, loaded.model_sizes) == (30, saved.loader, "plan", SIZES)
    torch.testing.assert_close(loaded.model, saved.model, rtol=0, atol=0)
    torch.testing.assert_close(loaded.optimizer, saved.optimizer, rtol=0, atol=0)
    torch.testing.assert_close(loaded.rng_states, saved.rng_states, rtol=0, atol=0)
    assert names(tmp_path) == ["latest", "step-00000030"]


def test_latest_follows_the_last_save_and_older_ones_stay(tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, make_checkpoint(step))
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step-00000020"
    save_checkpoint(tmp_path, make_checkpoint(10))
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step-00000010"
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000020"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(10, value=1.0))
    again = make_checkpoint(10, value=2.0)
    loaded = load_checkpoint(save_checkpoint(tmp_path, again), SIZES)
    torch.testing.assert_close(loaded.model, again.model, rtol=0, atol=0)
    assert names(tmp_path) == ["latest", "step-00000010"]


def test_failed_save_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_checkpoint(10))

    def disk_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.torch, "save", disk_full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, make_checkpoint(20))
    assert names(tmp_path) == ["latest", "step-00000010"]
    assert load_checkpoint(tmp_path / "step-00000010", SIZES).step == 10


def test_what_a_killed_save_left_is_neither_found_nor_kept(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_checkpoint(10))
    half = tmp_path / ".step-00000020.999.tmp"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step-00000010"
    save_checkpoint(tmp_path, make_checkpoint(20))
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000020"]


def test_pointer_to_a_removed_folder_falls_back_to_the_newest_complete_one(tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, make_checkpoint(step))
    (tmp_path / "latest").write_text("step-00000030\n")
    assert find_checkpoint("auto", tmp_path) == tmp_path / "step-00000020"


def test_finds_by_path_of_run_of_folder_and_of_one_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", make_checkpoint(10))
    for given in (tmp_path, tmp_path / "checkpoints", path):
        assert find_checkpoint(str(given), tmp_path / "elsewhere") == path


def test_auto_and_none_without_checkpoints_start_anew(tmp_path: Path) -> None:
    assert find_checkpoint("auto", tmp_path / "absent") is None
    save_checkpoint(tmp_path, make_checkpoint(10))
    assert find_checkpoint("none", tmp_path) is None


def test_path_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a checkpoint \(no state\.json in it\)"):
        find_checkpoint(str(tmp_path), tmp_path)


def test_other_model_is_refused_by_the_name_of_the_size(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(10))
    with pytest.raises(ValueError, match="a model of hidden_size 4, this run has 16"):
        load_checkpoint(path, {**SIZES, "hidden_size": 16})


def test_other_version_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(10))
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99, this script reads 1"):
        load_checkpoint(path, SIZES)


def change(path: Path, **values: Any) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": "10"}, "step must be of type int"),
        ({"step": True}, "step must be of type int"),
        ({"loader": None}, "loader must be of type dict"),
        ({"loader": []}, "loader must be of type dict"),
        ({"model_sizes": None}, "model_sizes must be of type dict"),
        ({"reroute": None}, "reroute must be of type str"),
        ({"step": 11}, "11 optimizer steps on 10 global batches"),
        ({"step": -10}, "-10 optimizer steps on 10 global batches"),
        ({"loader": {"root": {}}}, "10 optimizer steps on None global batches"),
    ],
)
def test_state_that_does_not_fit_together_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(10))
    change(path, **values)
    with pytest.raises(ValueError, match=rf"state\.json is damaged: {message}.*give --resume another checkpoint"):
        load_checkpoint(path, SIZES)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '{"format_version": 1}'])
def test_state_of_another_form_is_refused(content: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(10))
    (path / "state.json").write_text(content)
    with pytest.raises(ValueError, match=r"state\.json is damaged"):
        load_checkpoint(path, SIZES)


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "rng.pt"])
@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_cut_tensors_are_refused_by_name(name: str, size: int, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(10))
    file = path / name
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    with pytest.raises(ValueError, match=rf"{name} is damaged: .*give --resume another checkpoint"):
        load_checkpoint(path, SIZES)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint(10))

    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (path / "model.pt").write_bytes(pickle.dumps(Code(), protocol=2))
    with pytest.raises(ValueError, match="model.pt is damaged"):
        load_checkpoint(path, SIZES)
    assert not (tmp_path / "made").exists()


def test_full_disk_is_told_with_the_space_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make_checkpoint(10))

    def write_part(value: Any, path: Path) -> None:
        path.write_bytes(b"part")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0: ...")

    monkeypatch.setattr(checkpoints.torch, "save", write_part)
    with pytest.raises(OSError, match=r"model\.pt could not be written, [\d,.]+ MB are free on its disk \(\[enforce"):
        save_checkpoint(tmp_path, make_checkpoint(20))
    assert names(tmp_path) == ["latest", "step-00000010"]
