"""The peer that differential tests compare with."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from types import SimpleNamespace

import pytest

#: Release of megatron-core that the extra ``peers`` names.
PEER = "megatron-core"


@pytest.fixture(scope="session")
def megatron() -> SimpleNamespace:
    """The classes of megatron-core, by name."""
    try:
        version = importlib.metadata.version(PEER)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{PEER} is not installed; pip install 'tdp-megatron[peers]' for the differential tests")
    found: dict[str, object] = {"version": version}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about optional packages when imported
        for module, names in {
            "gpt_dataset": ["GPTDataset", "GPTDatasetConfig"],
            "blended_dataset": ["BlendedDataset"],
            "blended_megatron_dataset_builder": ["BlendedMegatronDatasetBuilder"],
            "utils": ["Split"],
            "helpers": [],
        }.items():
            imported = importlib.import_module(f"megatron.core.datasets.{module}")
            found[module] = imported
            found.update((name, getattr(imported, name)) for name in names)
    return SimpleNamespace(**found)
