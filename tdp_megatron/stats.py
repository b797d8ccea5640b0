"""Counters and timers that every node fills, and writers for the usual tools."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NodeStats", "flatten_stats", "prometheus_text", "write_tensorboard"]


@dataclass(slots=True)
class NodeStats:
    """What one node has done since it was made."""

    items: int = 0
    """Items (samples, global batches, steps) handed on."""
    tokens: int = 0
    """Tokens in them, as far as the node knows."""
    wait_seconds: float = 0.0
    """Time spent waiting for the source."""
    work_seconds: float = 0.0
    """Time spent in the node itself; in nodes of samples that of their sources included."""
    queue_depth: int = 0
    """Items that were ready when the last one was taken; only ``Prefetch`` has any."""
    gauges: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of observed values, by name."""
    began: float = field(default_factory=time.perf_counter)

    def observe(self, name: str, value: float) -> None:
        """Count one value of a gauge, such as the imbalance of a plan."""
        total, count = self.gauges.get(name, (0.0, 0))
        self.gauges[name] = (total + value, count + 1)

    def as_dict(self) -> dict[str, float]:
        """Counters, rates over the node's life, and the means of the gauges."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        values: dict[str, float] = {
            "items": self.items,
            "tokens": self.tokens,
            "items_per_second": self.items / seconds,
            "tokens_per_second": self.tokens / seconds,
            "wait_seconds": self.wait_seconds,
            "work_seconds": self.work_seconds,
            "queue_depth": self.queue_depth,
        }
        values.update({name: total / count for name, (total, count) in self.gauges.items()})
        return values

    def waiting(self) -> _Clock:
        """Count the time inside ``with`` as waiting for the source."""
        return _Clock(self, "wait_seconds")

    def working(self) -> _Clock:
        """Count the time inside ``with`` as work."""
        return _Clock(self, "work_seconds")


class _Clock:
    # A class: entering and leaving a generator costs three times as much, and nodes do it for every item.
    __slots__ = ("_begin", "_field", "_stats")

    def __init__(self, stats: NodeStats, field: str) -> None:
        self._stats = stats
        self._field = field

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._begin
        setattr(self._stats, self._field, getattr(self._stats, self._field) + seconds)


def flatten_stats(stats: Mapping[str, Any], separator: str = "/") -> dict[str, float]:
    """The numbers of nested statistics by path; anything else (texts, truth values, missing values) is left out.

    Args:
        stats: as ``Loader.stats()`` gives them.
        separator: between the parts of a path.

    Returns:
        Path -> number, such as ``"Pack/imbalance"``.
    """
    flat: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            for inner, number in flatten_stats(value, separator).items():
                flat[f"{name}{separator}{inner}"] = number
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[str(name)] = value
    return flat


def write_tensorboard(writer: Any, stats: Mapping[str, Any], step: int, *, prefix: str = "data") -> None:
    """Write every number as a scalar.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with ``add_scalar(tag, value, step)``.
        stats: as ``Loader.stats()`` gives them.
        step: training step.
        prefix: of the tags.
    """
    for name, value in flatten_stats(stats).items():
        writer.add_scalar(f"{prefix}/{name}", value, step)


def prometheus_text(stats: Mapping[str, Any], *, prefix: str = "tdp", labels: Mapping[str, str] | None = None) -> str:
    """Prometheus' text format, for a file the node exporter collects or for an HTTP handler.

    Args:
        stats: as ``Loader.stats()`` gives them.
        prefix: of the metric names.
        labels: put on every sample, such as ``{"rank": "3"}``.

    Returns:
        One gauge per kind of number, with the path of the node as label ``node``; lines end with a newline.

    Raises:
        ValueError: a prefix or a label that Prometheus does not allow, or the label ``node``.
    """
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise ValueError(f"prefix must be letters, digits, _ and :, and not begin with a digit; got {prefix!r}")
    for key in labels or {}:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", key) or key.startswith("__") or key == "node":
            raise ValueError(f"a label must be letters, digits and _, and neither __... nor node; got {key!r}")
    pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in (labels or {}).items())
    lines: list[str] = []
    typed: set[str] = set()
    for name, value in flatten_stats(stats).items():
        *path, metric = name.split("/")
        metric_name = re.sub(r"[^a-zA-Z0-9_:]", "_", f"{prefix}_{metric}")
        if metric_name not in typed:
            typed.add(metric_name)
            lines.append(f"# TYPE {metric_name} gauge")
        node = f'node="{_escaped("/".join(path))}"' if path else ""
        inside = ",".join(part for part in (node, pairs) if part)
        lines.append(f"{metric_name}{{{inside}}} {value}" if inside else f"{metric_name} {value}")
    # One metric's samples stand together, as the format asks.
    order = {
        m: i for i, m in enumerate(dict.fromkeys(re.split(r"[ {]", line.removeprefix("# TYPE "))[0] for line in lines))
    }
    lines.sort(key=lambda line: order[re.split(r"[ {]", line.removeprefix("# TYPE "))[0]])
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
