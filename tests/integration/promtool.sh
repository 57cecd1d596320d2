#!/usr/bin/env bash
# Puts Prometheus' own tool for rules, of Debian's package, into the folder $1. The tests that use it skip, and say so,
# where this can't be done.
set -euo pipefail
folder=$1
[ -x "$folder/promtool" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get -q download prometheus >/dev/null && dpkg-deb -x prometheus_*.deb .)
mkdir -p "$folder"
cp "$work/usr/bin/promtool" "$folder/promtool.part"
"$folder/promtool.part" --version >/dev/null
mv "$folder/promtool.part" "$folder/promtool"
