"""Checkpoints of trained parameters only: fingerprint of the frozen ones, which the program builds again.

The fingerprint is that of a checkpoint of these parameters, so it is the same under every strategy
and number of ranks. Ranks compute it from the shares that they would write: a pass of CRC-32 over
the memory, 7 ms for 101 MB on one core.

A run computes it at its start, at each save and at a resume. It must not be cached: parameters that
require no gradient may still change, such as an average of weights that the program keeps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.fingerprint import fingerprint_of_ranks
from hpctrain.checkpoint.format.plan import plan
from hpctrain.checkpoint.local_state import LocalState, Models, exchange
from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def frozen_fingerprint(models: Models, comm: Communicator | None) -> str:
    """Return the fingerprint of the parameters of models that require no gradient. Collective over ``comm``."""
    local = agreed(comm, lambda: LocalState.of(replace(models, only="frozen"), {}))
    description = local.description()
    everyone = [description] if comm is None else exchange(comm, description)[1]
    written = agreed(comm, lambda: plan([each.boxes for each in everyone], layout.ALIGNMENT))
    if comm is None:
        return fingerprint_of_ranks(written, local.sources, 0, lambda found: [found])
    return fingerprint_of_ranks(written, local.sources, comm.rank, comm.all_gather_object)


def check_same_frozen(models: Models, stored: Any, path: Path, comm: Communicator | None) -> None:
    """Raise ``CheckpointError`` if frozen parameters differ from those next to which a checkpoint was written.

    ``stored`` is their fingerprint in the file. Collective over ``comm``.
    """
    found = frozen_fingerprint(models, comm)
    if found != stored:
        raise CheckpointError(
            f"{path} holds only trained parameters, and the frozen ones of this program are others: their fingerprint "
            f"is {found}, not {stored}; build the model with the same frozen weights as the run that wrote it",
            everywhere=comm is not None,
        )


def check_unchanged(earlier: str, models: Models, comm: Communicator) -> None:
    """Raise ``UsageError`` if frozen parameters have changed in a run: a checkpoint would lose this. Collective."""
    if frozen_fingerprint(models, comm) != earlier:
        raise UsageError(
            "parameters that require no gradient have changed since the start of the run, or others require none; a "
            'checkpoint with only = "trained" has none of them, so a resume would lose the change; allowed are frozen '
            'parameters that stay as they are; set only = "all"',
            everywhere=True,
        )
