#!/usr/bin/env bash
# Puts NVIDIA's perf_analyzer, the last one that came in a wheel, and the two libraries it wants into the folder $1.
# The tests that use it skip, and say so, where this can't be done: it is a binary for Linux on x86-64, and one of the
# libraries comes from Debian.
set -euo pipefail
folder=$1
python=${2:-python3}
[ -x "$folder/perf_analyzer" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --platform manylinux1_x86_64 --dest "$work" tritonclient==2.44.0
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --platform manylinux2014_x86_64 --dest "$work" nvidia-cuda-runtime-cu12==12.9.79
(cd "$work" && apt-get -q download libb64-0d >/dev/null && dpkg-deb -x libb64-0d_*.deb .)
for wheel in "$work"/*.whl; do
    "$python" -m zipfile -e "$wheel" "$work"
done
mkdir -p "$folder"
cp "$work"/nvidia/cuda_runtime/lib/libcudart.so.12 "$work"/usr/lib/*/libb64.so.0d "$folder"
cp "$work"/tritonclient-*.data/data/bin/perf_analyzer "$folder/perf_analyzer.part"
chmod +x "$folder/perf_analyzer.part"
mv "$folder/perf_analyzer.part" "$folder/perf_analyzer"
