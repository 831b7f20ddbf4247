"""Text of slurm.conf and /etc/hosts for a Slurm cluster whose nodes all run on this machine; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CONTROLLER = "ctl"
NODES = ("a1", "a2", "a3")
CPUS = 4  # of each node, whatever this machine has
_ADDRESS = "127.0.0.1"

# cred_expire: the shortest time that a requeued job waits; more than two minutes with Slurm's default.
# TmpFS needs %n: srun --mpi=pmix puts its sockets there, and the sockets of two nodes would have the same name.
# SlurmdTimeout, KillWait: seconds that a node may be silent, and that a job may take to end.
_CONF = """\
ClusterName=private
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MailProg=/bin/true
"""
_NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs={cpus} RealMemory={memory}"
_MEMORY = 2000  # megabytes that a node reports
_PARTITION = "PartitionName=main Nodes={nodes} Default=YES State=UP MaxTime=INFINITE"


def slurm_conf(folder: Path, ports: Sequence[int]) -> str:
    """Return slurm.conf; ``ports`` are the controller's port and one port per node."""
    text = _CONF.format(controller=CONTROLLER, address=_ADDRESS, port=ports[0], folder=folder)
    nodes = [
        _NODE.format(name=name, address=_ADDRESS, port=port, cpus=CPUS, memory=_MEMORY)
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    return "\n".join([text, *nodes, _PARTITION.format(nodes=",".join(NODES)), ""])


def hosts() -> str:
    """Return the content of /etc/hosts on every machine."""
    return "".join(f"{_ADDRESS} {name}\n" for name in ("localhost", CONTROLLER, "munged", *NODES))
