"""Environment that must be set before torch and triton are imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks must not inherit an OpenMP pool
os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, at triton's import

import torch

torch.set_num_threads(1)
