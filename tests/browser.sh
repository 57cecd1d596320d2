#!/usr/bin/env bash
# Unpacks Debian's Chromium, with the libraries that this machine lacks, into the folder $1, without installing anything.
# Nothing is done where chromium is installed. The test that uses it skips, and says so, where this can't be done.
set -euo pipefail
folder=$1
[ -x "$folder/chromium" ] && exit 0
command -v chromium >/dev/null && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mapfile -t packages < <(apt-get install --simulate --no-install-recommends chromium | awk '$1 == "Inst" { print $2 }')
(cd "$work" && apt-get -q download "${packages[@]}" fonts-dejavu-core >/dev/null)
mkdir -p "$folder"
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$folder"
done
root=$(cd "$folder" && pwd)
libraries=$root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
printf '#!/bin/sh\nLD_LIBRARY_PATH=%q:%q exec %q "$@"\n' "$libraries" "$root/usr/lib" "$root/usr/lib/chromium/chromium" >"$folder/chromium.part"
chmod +x "$folder/chromium.part"
"$folder/chromium.part" --version
mv "$folder/chromium.part" "$folder/chromium"
