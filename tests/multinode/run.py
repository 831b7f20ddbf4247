"""Runner of a program on the ranks of two simulated nodes on one machine, with a slow cable between them.

    python tests/multinode/run.py                        the tests of communication, on two ranks per node
    python tests/multinode/run.py -- PROGRAM ARGS...     any program, as in: mpiexec -n 4 PROGRAM ARGS...

Needs root and network namespaces. Each node is a host to MPI: it has its own network, name and /dev/shm. The files are
those of this machine. With `--or-skip`, a machine that cannot do this prints the reason and exits with 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import launchers
from isolation import obstacle, run_isolated
from namespaces import NAMES, WIRE, Nodes, address

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Tests that send messages; computation is the same on any number of nodes, so its tests run on one.
SUITES = (
    "tests/comm",
    "tests/data/test_cache.py",
    "tests/doctor/preflight",
    "tests/parallel/test_ddp.py",
    "tests/parallel/test_ddp_gradients.py",
    "tests/parallel/test_ddp_messages.py",
    "tests/parallel/test_ddp_nodes.py",
    "tests/parallel/test_hybrid.py",
    "tests/parallel/fsdp/test_fsdp_reduce.py",
    "tests/parallel/fsdp/test_fsdp_learning.py",
    "tests/parallel/fsdp/test_fsdp_memory.py",
    "tests/parallel/fsdp/test_fsdp_messages.py",
    "tests/parallel/pipeline",
    "tests/parallel/asynchronous",
    "tests/parallel/tensor/test_tensor_messages.py",
    "tests/parallel/reproducible",
    "tests/train/test_async_control.py",
    "tests/train/test_reproducible.py",
)
_INSIDE = "MULTINODE_INSIDE"  # set inside the isolated namespace
_PORT = 7700
_WIRE_SECONDS = 1.0


def main() -> int:
    """Run the program and return its exit code, or that of the first step that fails."""
    args = parse()
    if _INSIDE in os.environ:
        return inside(args)
    if reason := obstacle():
        print(f"{'skipped' if args.or_skip else 'error'}: two nodes on one machine: {reason}")
        return 0 if args.or_skip else 1
    os.environ[_INSIDE] = "1"
    return run_isolated([sys.executable, *sys.argv])


def parse() -> argparse.Namespace:
    """Return the parsed options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--or-skip", action="store_true", help="exit with 0 where this machine cannot play two")
    parser.add_argument("--rate", default="1gbit", help="rate of the cable each way, in the words of tc (1gbit)")
    parser.add_argument("-n", dest="ranks", type=int, default=4, help="ranks, half of them on each node (4)")
    parser.add_argument("program", nargs="*", help="program and arguments, after --; without one: the tests")
    args = parser.parse_args()
    if args.ranks < 1 or args.ranks % len(NAMES):
        parser.error(f"{args.ranks} ranks cannot sit in equal numbers on {len(NAMES)} nodes")
    return args


def inside(args: argparse.Namespace) -> int:
    """Make the nodes and run the requested program or tests on them."""
    del os.environ[_INSIDE]
    with Nodes(args.rate) as nodes:
        if args.program:
            return launch(nodes, args.ranks, args.program)
        steps = (check_wire, check_nodes, run_tests)
        return next((code for code in (step(nodes, args.ranks) for step in steps) if code), 0)


def launch(nodes: Nodes, ranks: int, program: list[str]) -> int:
    """Run a program on the ranks of both nodes; the launcher runs on the first."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    path = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if path is None:
        raise SystemExit("no mpiexec beside the interpreter or in PATH")
    start = launchers.start(path, launchers.version_of(path), str(HERE / "agent.py"), NAMES, ranks // len(NAMES), WIRE)
    # Gloo uses the first network device otherwise, which is not connected.
    return nodes.run(0, [*start.command, *program], {"GLOO_SOCKET_IFNAME": WIRE, **start.variables})


def check_wire(nodes: Nodes, ranks: int) -> int:
    """Print the throughput of plain TCP over the cable, both ways at once."""
    python = [sys.executable, str(ROOT / "benchmarks" / "bandwidth.py")]
    common = [address(0), str(_PORT), str(_WIRE_SECONDS)]
    ends = [
        subprocess.Popen(nodes.on(node, [*python, role, *common]), stdout=subprocess.PIPE, text=True)
        for node, role in enumerate(("serve", "call"))
    ]
    rates = [float(end.communicate()[0] or "nan") for end in ends]
    print(f"the cable carries {' and '.join(f'{rate * 8 / 1e9:.3f}' for rate in rates)} Gbit/s, both ways at once")
    return max(end.returncode for end in ends)


def check_nodes(nodes: Nodes, ranks: int) -> int:
    """Let the ranks assert that they are on two nodes, and check that their bytes pass the cable."""
    before = nodes.wire_bytes()
    code = launch(nodes, ranks, [sys.executable, str(HERE / "two_nodes.py"), *NAMES])
    sent = [now - then for then, now in zip(before, nodes.wire_bytes())]
    print(f"the nodes have sent {' and '.join(f'{count / 2**20:.1f}' for count in sent)} MiB")
    return code


def run_tests(nodes: Nodes, ranks: int) -> int:
    """Run the test suites of communication."""
    os.chdir(ROOT)
    return launch(nodes, ranks, [sys.executable, "-m", "pytest", "-m", "ranks and not slow", "--cases", "few", *SUITES])


if __name__ == "__main__":
    sys.exit(main())
