#!/bin/sh
# Try a compiler of MPI (MPICC) before mpi4py is built with it; print in one line what it lacks.
set -u
# shellcheck disable=SC2086 # MPICC may hold options
said=$(printf '#include <mpi.h>\nint main(int n, char **words) { return MPI_Init(&n, &words); }\n' |
    ${MPICC:-mpicc} -x c -o /dev/null - 2>&1) && exit 0
said=$(printf '%s\n' "$said" | grep -i -m 1 -e 'error' -e 'not found' -e 'cannot' || printf '%s\n' "$said" | head -n 1)
echo "MPI=site: ${MPICC:-mpicc} cannot compile a program of MPI: ${said:-no message}; load the site's compiler and MPI" \
    "modules, or install the MPI's development package (Debian: libopenmpi-dev)" >&2
exit 1
