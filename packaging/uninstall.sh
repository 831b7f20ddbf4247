#!/usr/bin/env bash
# Remove the files that install.sh has put into PREFIX and MODULES, and no others.
set -euo pipefail

fail() {
    echo "make uninstall: $*" >&2
    exit 2
}

PREFIX=${PREFIX:-} MODULES=${MODULES:-}
for name in PREFIX MODULES; do
    [ -n "${!name}" ] || fail "$name is missing: make uninstall PREFIX=/apps/hpctrain/VERSION MODULES=/apps/modulefiles"
done
PREFIX=$(realpath -sm "$PREFIX") modules=$(realpath -sm "$MODULES")/hpctrain
[ -f "$PREFIX/.hpctrain-install" ] || fail "PREFIX=$PREFIX was not created by make install: nothing is removed"

# The modules first, so that users cannot load a partly removed installation. Their names are arbitrary; each contains
# the PREFIX that it is for.
for file in "$modules"/*; do
    if [ -f "$file" ] && grep -qFx -e "set root {$PREFIX}" -e "local root = \"$PREFIX\"" "$file"; then
        rm "$file"
    fi
done
rmdir --ignore-fail-on-non-empty "$modules" 2>/dev/null || true
rm -rf "$PREFIX/venv" "${PREFIX:?}/bin" "$PREFIX/share" "$PREFIX/.hpctrain-install"
rmdir --ignore-fail-on-non-empty "$PREFIX"
