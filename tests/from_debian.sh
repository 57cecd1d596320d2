#!/usr/bin/env bash
# Puts one file of a Debian package into a folder: from_debian.sh FOLDER PACKAGE FILE, where FILE may be a pattern. Nothing
# is installed. The tests that use it skip, and say so, where this can't be done.
set -euo pipefail
folder=$1 package=$2 file=$3
found=$folder/$(basename "$file")
[ -e "$found" ] && exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get -q download "$package" >/dev/null && dpkg-deb -x "$package"_*.deb .)
mkdir -p "$folder"
# shellcheck disable=SC2086 # the pattern is to be expanded
cp "$work"/$file "$found.part"
mv "$found.part" "$found"
