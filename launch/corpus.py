"""Real text that every machine with Python has, as two JSONL datasets, and a tokenizer trained on both.

``code.jsonl`` holds the sources of the standard library, one module per document. ``prose.jsonl`` holds the chapters
of Python's language reference that ``help()`` shows and the descriptions, read-me files and licences of the installed
packages. Nothing is downloaded. The same interpreter and packages give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from files import write_text

Document = tuple[str, str]
"""(where it comes from, text)"""

END_OF_TEXT = "<|endoftext|>"

SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}

PROSE_FILES = ("authors", "changelog", "copying", "license", "licence", "notice", "readme")


def standard_library() -> Iterator[Document]:
    """Modules of the standard library without its tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            try:
                with tokenize.open(path) as file:
                    yield relative.as_posix(), file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                # Some modules are in an odd encoding on purpose, and distributions leave dangling links.
                continue


def language_reference() -> Iterator[Document]:
    """What ``help("topic")`` shows; empty where the distribution leaves it out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name, text in topics.items():
        yield f"topics/{name}", text


def package_texts() -> Iterator[Document]:
    """Descriptions, read-me files and licences of the installed packages."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or "unnamed"
        description = (distribution.read_text("METADATA") or "").partition("\n\n")[2]
        yield f"{name}/description", description
        for file in distribution.files or ():
            if file.name.lower().startswith(PROSE_FILES) and file.suffix.lower() in ("", ".md", ".rst", ".txt"):
                try:
                    yield f"{name}/{file}", Path(str(file.locate())).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError):
                    continue


def select(documents: Iterable[Document], max_bytes: int) -> list[Document]:
    """A spread of the documents up to a size: no text twice, in an order that depends on names alone."""
    by_hash = sorted(documents, key=lambda d: hashlib.sha256(d[0].encode()).digest())
    chosen: list[Document] = []
    seen: set[bytes] = set()
    size = 0
    for name, text in by_hash:
        encoded = text.strip().encode("utf-8", errors="replace")
        digest = hashlib.sha256(encoded).digest()
        if len(encoded) < 64 or digest in seen or size + len(encoded) > max_bytes:
            continue
        seen.add(digest)
        size += len(encoded)
        chosen.append((name, encoded.decode()))
    return chosen


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Byte-level byte-pair encoding, which can encode any text.

    Args:
        texts: What to learn the merges from.
        vocab_size: Ids, among them the 256 bytes and the end-of-text token.

    Returns:
        The content of ``tokenizer.json``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content: str = tokenizer.to_str(pretty=True)
    return content


def main(arguments: list[str] | None = None) -> int:
    """Write ``code.jsonl``, ``prose.jsonl`` and ``tokenizer.json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--code-megabytes", type=float, default=4.0, help="most code to take (default: %(default)s)")
    parser.add_argument("--prose-megabytes", type=float, default=2.0, help="most prose to take (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="ids of the tokenizer (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.vocab_size < 257:
        parser.error(f"--vocab-size {options.vocab_size} is below 257: 256 bytes and {END_OF_TEXT}")

    datasets = {
        "code": select(standard_library(), int(options.code_megabytes * 1e6)),
        "prose": select([*language_reference(), *package_texts()], int(options.prose_megabytes * 1e6)),
    }
    for name, documents in datasets.items():
        if not documents:
            print(
                f"error: found no text for the {name} dataset in {sysconfig.get_paths()['stdlib']}; "
                "use a Python with its standard library's sources (Debian: libpython3-stdlib)",
                file=sys.stderr,
            )
            return 1
    try:
        _write(datasets, options.output_dir, options.vocab_size)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _write(datasets: dict[str, list[tuple[str, str]]], folder: Path, vocab_size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in datasets.items():
        lines = [json.dumps({"text": text, "source": source}) for source, text in documents]
        write_text(folder / f"{name}.jsonl", "\n".join(lines) + "\n")
        megabytes = sum(len(text.encode()) for _, text in documents) / 1e6
        print(f"{name}: {len(documents)} documents, {megabytes:.1f} MB")
    texts = (text for documents in datasets.values() for _, text in documents)
    write_text(folder / "tokenizer.json", train_tokenizer(texts, vocab_size))
    print(f"tokenizer: {vocab_size} ids")


if __name__ == "__main__":
    sys.exit(main())
