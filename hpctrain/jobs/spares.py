"""Spare nodes of a job (``--spares``): shell code that starts the run again within its allocation.

The job has more nodes than the run needs. When a start has failed, the script looks for the nodes of
the job that still answer, and starts the run again on as many as it needs, without queueing. Slurm
keeps such a job when one of its nodes has failed (``--no-kill``), also when that was the node of the
script: a step on another node watches it, and lets Slurm requeue the job then. PBS keeps a job that
has lost a node other than that of the script (``tolerate_node_failures``), and restarts it otherwise.
"""

from __future__ import annotations

from hpctrain.cluster.nodes import SPARES
from hpctrain.errors import UsageError
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.template import Raw, Value

LIVING = "HPCTRAIN_LIVING"  # nodes that answered before the script started itself again
WATCHER = "HPCTRAIN_WATCHER"  # process id of the steps that watch the node of the script
HOSTS = Raw('"$hosts"')
NODE_FILE = "HPCTRAIN_NODEFILE"  # PBS's file of all nodes of the job
_LAUNCHERS = {"slurm": ("srun", "openmpi", "hydra"), "pbs": ("openmpi", "hydra")}
_PROBE = 60  # seconds in which a node must answer
_NAME = "watch"  # of the step that watches the node of the script
_EVERY = 10  # seconds between two looks at the state of the node of the script
_SMALL = "srun --overlap --nodes=1 --ntasks=1 --mpi=none"  # a step that needs no resources of its own


def spare_values(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders for spare nodes; None if the job has none."""
    if not request.spares:
        return {"nodes": request.nodes_text, "no_kill": None, "living": None, "watch": None, "again": None}
    _check(request, profile)
    return {
        "nodes": request.nodes + request.spares,
        "no_kill": "--no-kill",
        "living": tuple(map(Raw, _living(request, profile))),
        "watch": tuple(map(Raw, _watch())),
        "again": tuple(map(Raw, _again())),
    }


def _check(request: Request, profile: Profile) -> None:
    if profile.launcher not in _LAUNCHERS[profile.scheduler]:
        allowed = ", ".join(_LAUNCHERS[profile.scheduler])
        raise UsageError(f"spares = {request.spares}: with the launcher {profile.launcher}; allowed are {allowed}")


def on_living_nodes(request: Request, profile: Profile) -> list[str]:
    """Return the options of the launcher that start the ranks on the nodes that answer; none without spare nodes."""
    if not request.spares or profile.scheduler == "pbs":  # whose launchers read a file
        return []
    if profile.launcher == "srun":
        counts = [f"--nodes={request.nodes}", f"--ntasks={request.ranks}"]
        return ["--overlap", *counts, f"--ntasks-per-node={request.ranks_per_node}", Raw(f"--nodelist={HOSTS}")]
    return ["--host" if profile.launcher == "openmpi" else "-hosts", HOSTS]


def _living(request: Request, profile: Profile) -> list[str]:
    """Return the lines that choose the nodes of this start."""
    slots = f":{request.ranks_per_node}" if profile.launcher == "openmpi" else ""
    return [
        f"needed={request.nodes} # other nodes of the job are spare",
        f"read -ra living <<<\"${{{LIVING}:-$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | tr '\\n' ' ')}}\"",
        f"hosts=$(printf ',%s{slots}' \"${{living[@]:0:needed}}\") && hosts=${{hosts:1}}",
        f"export {SPARES}=$((${{#living[@]}} - needed)) SLURM_OVERLAP=1 # steps of a failed start may still be ending",
        "# Print the nodes of the job on which a step starts.",
        "answering() {",
        '    scontrol show hostnames "$SLURM_JOB_NODELIST" |',
        f"        xargs -P 64 -I {{}} timeout {_PROBE} {_SMALL} --nodelist={{}} printenv SLURMD_NODENAME 2>/dev/null |",
        "        sort -V",
        "}",
    ]


def _watch() -> list[str]:
    """Return the lines that start a watch over the node of the script, unless it is running.

    If the watching node dies, another one takes over. The step ignores SIGUSR1, by which Slurm announces
    the end of the job to all steps.
    """
    body = (
        f'trap "" USR1; while sleep {_EVERY}; do scontrol show node "$0" | grep -q State=DOWN && scontrol requeue "$1";'
        " done"
    )
    return [
        "# If this node dies, this script dies with it: a step on another node then lets Slurm requeue the job.",
        "watch() {",
        "    local node",
        "    for node in $(printf '%s\\n' \"${living[@]}\" | tac); do",
        '        if [ "$node" != "$SLURMD_NODENAME" ]; then',
        "            # shellcheck disable=SC2016 # the other node expands it",
        f'            {_SMALL} --job-name={_NAME} --nodelist="$node" bash -c \'{body}\' "$SLURMD_NODENAME" "$job"',
        "        fi",
        "    done >/dev/null 2>&1",
        "}",
        "export HPCTRAIN_START=$job.${SLURM_RESTART_COUNT:-0}.$starts # the lock of an earlier start is void",
        f'if ! kill -0 "${WATCHER}" 2>/dev/null; then',
        "    watch &",
        f"    export {WATCHER}=$!",
        "fi",
    ]


def _again() -> list[str]:
    """Return the lines that start the script again if enough nodes answer; else the job is requeued."""
    return [
        'if [ "$code" -ne 75 ]; then',
        "    # mpiexec and mpirun may leave ranks on the nodes that live.",
        "    squeue --steps --noheader --jobs=\"$job\" --format='%i %j' 2>/dev/null |",
        f"        awk '$1 ~ /[.][0-9]+$/ && $2 != \"{_NAME}\" {{print $1}}' | xargs -r scancel",
        "    mapfile -t living < <(answering)",
        '    if [ "${#living[@]}" -ge "$needed" ]; then',
        '        echo "job $job starts again on ${living[*]:0:needed} (exit code $code)"',
        f'        export {LIVING}="${{living[*]}}"',
        '        exec "$BASH" "$0"',
        "    fi",
        '    echo "job $job: ${#living[@]} nodes answer, $needed are needed: Slurm requeues the job"',
        "fi",
    ]


# PBS ------------------------------------------------------------------------------------------------------------------


def pbs_spare_values(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders for spare nodes of a PBS job; None if it has none."""
    ends = f"$(($(date +%s) + {request.walltime}))"
    if not request.spares:
        return {"tolerate": None, "ends": Raw(ends), "living": None, "again": None}
    _check(request, profile)
    return {
        "tolerate": Raw("-W tolerate_node_failures=all"),
        "ends": Raw(f"${{{LIVING}:+$HPCTRAIN_DEADLINE}} ends=${{ends:-{ends}}}"),
        "living": tuple(map(Raw, _living_of_pbs(request, profile))),
        "again": tuple(map(Raw, _again_of_pbs())),
    }


def _living_of_pbs(request: Request, profile: Profile) -> list[str]:
    """Return the lines that write a file with the nodes of this start, which the launchers read."""
    agent = {"hydra": "HYDRA_LAUNCHER_EXEC", "openmpi": "PRTE_MCA_plm_ssh_agent"}[profile.launcher]
    return [
        f"needed={request.nodes} # other nodes of the job are spare",
        f"export {NODE_FILE}=${{{NODE_FILE}:-$PBS_NODEFILE}} # all nodes of the job",
        f"read -ra living <<<\"${{{LIVING}:-$(sort -u \"${NODE_FILE}\" | tr '\\n' ' ')}}\"",
        'PBS_NODEFILE=$(cd "$folder" && pwd)/nodes',
        f'grep -xF "$(printf \'%s\\n\' "${{living[@]:0:needed}}")" "${NODE_FILE}" >"$PBS_NODEFILE" || exit 1',
        f"export PBS_NODEFILE {SPARES}=$((${{#living[@]}} - needed))",
        "# Print the nodes of the job on which a command starts.",
        "answering() {",
        "    # shellcheck disable=SC2016 # another shell expands it",
        f'    sort -u "${NODE_FILE}" | xargs -P 64 -I {{}} "$BASH" -c \\',
        f'        \'timeout {_PROBE} "$0" "$1" true </dev/null >/dev/null 2>&1 && echo "$1"\' \\',
        f'        "${{{agent}:-ssh}}" {{}} | sort -V',
        "}",
    ]


def _again_of_pbs() -> list[str]:
    """Return the lines that start the script again if enough nodes answer; else the job is submitted again."""
    return [
        'if [ "$code" -ne 75 ]; then',
        "    # mpiexec and mpirun may leave processes.",
        '    { kill -TERM -- "-$pid" && sleep 10 && kill -KILL -- "-$pid"; } 2>/dev/null',
        "    mapfile -t living < <(answering)",
        '    if [ "${#living[@]}" -ge "$needed" ]; then',
        '        echo "job $PBS_JOBID starts again on ${living[*]:0:needed} (exit code $code)"',
        f'        export {LIVING}="${{living[*]}}"',
        '        kill "$watch"',
        '        exec "$BASH" "$script"',
        "    fi",
        '    echo "job $PBS_JOBID: ${#living[@]} nodes answer, $needed are needed: the job is submitted again"',
        "fi",
        f"unset {LIVING} {NODE_FILE}",
    ]
