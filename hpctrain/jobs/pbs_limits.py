"""Warnings about limitations of a PBS, at submission instead of when a checkpoint is lost."""

from __future__ import annotations

from hpctrain.cluster import pbs_server


def warnings(queue: str, folder: str, save_seconds: float, ask: pbs_server.Ask | None = None) -> list[str]:
    """Return warnings for a job in a queue (empty: the default one) whose checkpoints took up to ``save_seconds``.

    Empty if PBS does not answer.
    """
    server = pbs_server.server(ask)
    if server is None:
        return []
    found = []
    if not pbs_server.may_submit_itself(server):
        found.append(
            "this PBS lets no job submit jobs (flatuid is not set), so the job cannot resubmit itself; "
            f"{folder}/output.txt will say how to submit it again; ask the site to set flatuid = True"
        )
    name = queue or str(server.get("default_queue", ""))
    facts = pbs_server.queue(name, ask) if name else None
    if facts is not None and save_seconds > (seconds := pbs_server.kill_delay(facts)):
        found.append(
            f"a checkpoint of this run has taken {save_seconds:.1f} s, and qdel leaves {seconds} s (kill_delay of "
            f"queue {name}): it would be lost; to save and end: touch {folder}/STOP"
        )
    return found
