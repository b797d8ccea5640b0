"""The live tables: the loader's own statistics in a terminal, plain lines everywhere else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tdp_megatron.nodes import Blend, DocumentSample, IndexedRead, Loader, Pack, Prefetch, Reroute
from tdp_megatron.testing import write_corpus
from tdp_megatron.types import ParallelLayout, Step

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
from live_view import LiveView, node_table, source_table


@pytest.fixture
def loader(tmp_path: Path) -> Loader[Step]:
    prefixes = [write_corpus(tmp_path / name, [[1] * 8] * 10) for name in ("code", "prose")]
    sources = [DocumentSample(IndexedRead(prefix), max_seqlen=8, num_epochs=None) for prefix in prefixes]
    packed = Pack(Blend(sources, [0.75, 0.25]), ParallelLayout(1, 1, 64), global_batch_size=4)
    return Loader(Prefetch(Reroute(packed), depth=1))


def shown(*tables: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    for table in tables:
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_tables_hold_the_loaders_statistics(loader: Loader[Step]) -> None:
    for _, _ in zip(range(5), loader, strict=False):
        pass
    loader.root.shutdown()  # type: ignore[attr-defined]  # nothing is counted any more
    stats = loader.stats()
    text = shown(node_table(stats), source_table(stats))
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines() if len(line.split()) > 1}
    assert set(stats) <= set(rows)
    assert rows["Prefetch"][1] == "5"
    assert rows["Pack"][-2:] == ["imbalance", f"{stats['Pack']['imbalance']:.3f}"]
    assert rows["Reroute"][-2:] == ["padding", f"{stats['Reroute']['padding']:.3f}"]
    shares = [row for row in rows.values() if row[-2] in ("75.00%", "25.00%")]
    assert [row[-4] for row in shares] == [str(source["drawn"]) for source in stats["Blend"]["sources"].values()]
    assert max(len(line.rstrip()) for line in shown(node_table(stats)).splitlines()) <= 80


def test_a_terminal_gets_tables_and_lines(loader: Loader[Step]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, legacy_windows=False)
    with LiveView(True, console) as view:
        assert view.is_live
        view.say("step 1 [not markup]")
        next(iter(loader))
        view.update(loader.stats())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 1 [not markup]" in text
    assert "Prefetch" in text
    loader.root.shutdown()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wanted", "terminal"), [(True, False), (False, True), (False, False)])
def test_elsewhere_there_are_only_lines(wanted: bool, terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with LiveView(wanted, console) as view:
        assert not view.is_live
        view.update({"Pack": {"items": 3}})
        view.say("step 1")
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "step 1\n"
