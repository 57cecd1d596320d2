"""Embed a corpus with `paceline bulk`: the documentation and the licences of an environment, paragraph by paragraph.

    python -m examples.embedding.bulk [FOLDER…]

Texts are made into tokens first, and the encoder and the pooling into one model, so that the job can put texts of
similar lengths together. Every embedding is compared with one that ONNX Runtime alone makes of the text alone. The last
line has the result. It needs `pip install onnx`.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq

from examples.embedding.build import build
from examples.embedding.demo import LEAST_LIKENESS
from examples.embedding.directly import embedded, tokenized
from examples.embedding.pooling import model as pooling
from examples.offline import at_fault, bulk, parts

NAMES = re.compile(r"(licen[sc]e|notice|copying|copyright|readme|.*\.(md|rst)$)", re.IGNORECASE)
MOST_TEXTS = 4_096
LEAST_LETTERS = 20


def corpus(folders: Iterable[Path], most: int = MOST_TEXTS) -> list[tuple[str, str]]:
    """Files and paragraphs of documentation and licences, each paragraph once, evenly spread over all there are."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if NAMES.match(path.name) and path.is_file() and not path.is_symlink():
                for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace")):
                    text = " ".join(paragraph.split())
                    if sum(map(str.isalpha, text)) >= LEAST_LETTERS:
                        found.setdefault(text, str(path).encode(errors="replace").decode())
    texts = [(path, text) for text, path in found.items()]
    return [texts[place] for place in np.linspace(0, len(texts) - 1, min(most, len(texts))).astype(int)]


def write_tokens(repository: Path, texts: Sequence[tuple[str, str]], file: Path) -> None:
    """A row for each text; its tokens are as many as it has."""
    tokens = tokenized(repository, [text for _, text in texts])
    columns = {name: pa.array([one[name] for one in tokens], pa.list_(pa.int64())) for name in tokens[0]}
    named = {"path": [path for path, _ in texts], "text": [text for _, text in texts]}
    pq.write_table(pa.table(named | columns), file)


def write_model(repository: Path, file: Path) -> None:
    """The encoder with the pooling behind it, as one model: tokens in, `sentence_embedding` out."""
    whole, end = onnx.load(repository / "encoder" / "1" / "model.onnx"), onnx.compose.add_prefix(pooling(), "pooling/")
    joined = {
        "pooling/token_embeddings": "last_hidden_state",
        "pooling/attention_mask": "attention_mask",
        "pooling/embedding": "sentence_embedding",
    }
    for node in end.graph.node:
        node.input[:] = [joined.get(name, name) for name in node.input]
        node.output[:] = [joined.get(name, name) for name in node.output]
    (output,) = end.graph.output
    output.name = "sentence_embedding"
    whole.graph.node.extend(end.graph.node)
    whole.graph.initializer.extend(end.graph.initializer)
    del whole.graph.output[:]
    whole.graph.output.append(output)
    onnx.checker.check_model(whole)
    file.parent.mkdir(parents=True)
    onnx.save(whole, file)


def compare(texts: Sequence[tuple[str, str]], work: Path) -> str:
    """Have the texts embedded in the folder `work`; the result in words. Exits if anything is amiss."""
    repository, file, out = build(work / "models"), work / "corpus.parquet", work / "vectors"
    write_tokens(repository, texts, file)
    write_model(repository, work / "sentences" / "1" / "model.onnx")
    bulk(
        work / "sentences",
        "-i",
        file,
        "-o",
        out,
        "--keep",
        "path,text",
        "--output",
        "embedding=sentence_embedding",
        "--sort-by-length",
    )
    written = pa.concat_tables(parts(out))
    if written["text"].to_pylist() != [text for _, text in texts] or at_fault(out):
        sys.exit("the output hasn't exactly the input's rows, in their order")
    vectors = written["embedding"].combine_chunks().flatten().to_numpy().reshape(len(texts), -1)
    likeness = (vectors * embedded(repository, [text for _, text in texts])).sum(axis=1)
    if wrong := int((likeness < LEAST_LIKENESS).sum()):
        sys.exit(f"{wrong} of {len(texts)} embeddings differ from those of ONNX Runtime alone: {likeness.min():.4f}")
    return f"{len(texts)} texts: all embeddings are those of ONNX Runtime alone, to a cosine of {likeness.min():.6f}"


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]] or [Path("docs"), Path(sysconfig.get_paths()["platlib"])]
    texts = corpus(folders)
    print(f"{len(texts)} paragraphs of documentation and licences")
    with tempfile.TemporaryDirectory() as work:
        print(compare(texts, Path(work)))


if __name__ == "__main__":
    main()
