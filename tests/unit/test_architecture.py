"""The arrows of import, what `import tdp_megatron` loads, and the public surface."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tdp_megatron

PACKAGE = Path(tdp_megatron.__file__).parent

#: What each part may import of ours. "cli" and "testing" may import anything.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "arguments": set(),
    "stats": set(),
    "background": set(),
    "torch_dtypes": set(),
    "sample": {"torch_dtypes"},
    "types": {"sample", "ops"},  # ops: the views of PackedBatch, imported when called
    "ranges": {"arguments", "types"},
    "samples": {"_C", "torch_dtypes", "types"},
    "reading": {"_C", "types", "samples"},
    "tokenization": {"errors"},
    "indexed": {"_C", "errors", "types"},
    "datasets": {"_C", "errors", "types", "samples", "indexed", "distributed"},
    "schedule": {"_C", "errors", "types"},
    "ops": {"_C", "errors", "torch_dtypes", "types", "schedule"},
    "distributed": {"_C", "background", "errors", "torch_dtypes", "types", "samples", "reading", "schedule", "ops"},
    "nodes": {
        "_C",
        "errors",
        "arguments",
        "types",
        "ranges",
        "stats",
        "background",
        "samples",
        "reading",
        "indexed",
        "datasets",
        "schedule",
        "ops",
        "distributed",
    },
    "loops": {
        "_C",
        "errors",
        "arguments",
        "torch_dtypes",
        "types",
        "ranges",
        "stats",
        "background",
        "samples",
        "reading",
        "schedule",
        "distributed",
        "ops",
    },
}
HEAVY = ("triton", "transformer_engine", "boto3", "matplotlib", "megatron", "tokenizers", "tiktoken", "sentencepiece")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def type_checking_blocks(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in node.body:
                lines.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    return lines


def imports(path: Path, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Dotted names a module imports when it runs, without those for type checkers."""
    tree = ast.parse(path.read_text())
    skipped = type_checking_blocks(tree)
    for node in tree.body if top_level else ast.walk(tree):
        if getattr(node, "lineno", 0) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module == "tdp_megatron":
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_of_import(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "cli", "testing"):
        return
    assert part in ARROWS, f"{part} has no arrows; add it to the design and here"
    for name, line in imports(path):
        where = f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        top, *rest = name.split(".")
        if top == "tdp_megatron":
            assert rest, where
            assert rest[0] == part or rest[0] in ARROWS[part], where
        if part == "schedule":
            assert top in {"tdp_megatron", "numpy", *sys.stdlib_module_names}, where
        if top == "torchdata":
            assert part == "nodes", where


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_when_used(path: Path) -> None:
    for name, line in imports(path, top_level=True):
        if name.split(".")[0] in HEAVY:
            assert "triton" in path.name, f"{path}:{line} imports {name} at import time"


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, tdp_megatron; print(' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "tdp_megatron" in loaded
    assert not {"torch", "torchdata", "numpy", *HEAVY} & set(loaded)


def test_importing_the_schedule_does_not_load_torch() -> None:
    code = "import sys, tdp_megatron.schedule; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_public_names() -> None:
    assert list(tdp_megatron.__all__) == sorted(tdp_megatron.__all__)
    assert len(tdp_megatron.__all__) <= 24
    for name in tdp_megatron.__all__:
        assert getattr(tdp_megatron, name).__name__ == name
        assert name in dir(tdp_megatron)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tdp_megatron.nothing


def test_every_file_of_the_package_is_of_readable_size() -> None:
    assert {p.name: n for p in modules() if (n := len(p.read_text().splitlines())) > 450} == {}
