"""Runs for experiment trackers, from their files alone: CSV, TensorBoard, MLflow, Weights & Biases.

No rank of a run has to load a tracker. Each function writes all rows of the runs' metrics, their settings
where the tracker has a place for them, and returns a sentence on what it has written.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.report.runs import ReportedRun
from hpctrain.train import metrics
from hpctrain.train.receipt.write import maybe
from hpctrain.train.tensorboard import EventFile, scalars_of
from hpctrain.util import atomic
from hpctrain.util.text import counted

PROJECT = "hpctrain"  # experiment of MLflow, project of Weights & Biases
_BATCH = 1000  # metrics in one call of MLflow, its limit
_PARAMETERS, _LONGEST = 100, 6000  # parameters in one call, characters of a value
_STATUS = {"running": "RUNNING", "finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED", "killed": "KILLED"}

Row = dict[str, Any]
Write = Callable[[Sequence[ReportedRun], Path], str]


def all_rows(run: ReportedRun) -> list[Row]:
    """Return all rows of a run's metrics. Raises ``UsageError``."""
    path = run.state.folder / metrics.NAME
    try:
        return metrics.read(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def to_csv(runs: Sequence[ReportedRun], output: Path) -> str:
    """Write a line per step, with a column per value, into one file."""
    names = dict.fromkeys(name for run in runs for row in all_rows(run) for name in row)
    first = ["run"] if len(runs) > 1 else []
    count = 0
    with atomic.replacing(output) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.DictWriter(text, [*first, *names], restval="", lineterminator="\n")
        writer.writeheader()
        for run in runs:
            for row in all_rows(run):
                writer.writerow({**row, "run": run.name} if first else row)
                count += 1
        text.detach()  # writes the rest; the file stays open
    return f"wrote {counted(count, 'row', ',')} into {output}"


def to_tensorboard(runs: Sequence[ReportedRun], output: Path) -> str:
    """Write a file of events for each run into a folder of its name; an earlier file of the same run is replaced."""
    for run in runs:
        folder = output / run.name if len(runs) > 1 else output
        earlier = list(folder.glob("events.out.tfevents.*"))
        if earlier and run.state.status == "running":
            raise UsageError(f"{folder} has events, and the run may be writing them: name another folder with -o")
        for path in earlier:
            path.unlink()
        events = EventFile(folder, 0)
        for row in all_rows(run):
            events.write(row)
        events.close()
    return f"wrote {counted(len(runs), 'run')} into {output}: tensorboard --logdir {output}"


# MLflow ---------------------------------------------------------------------------------------------------------------


def to_mlflow(runs: Sequence[ReportedRun], output: Path) -> str:
    """Write an MLflow run for each run, which replaces an earlier one of the same folder.

    ``MLFLOW_TRACKING_URI`` names the server; without it, files are written into the folder ``output``.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    where = os.environ.get("MLFLOW_TRACKING_URI")
    if where is None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        where = output.absolute().as_uri()
    try:
        client = MlflowClient(tracking_uri=where)
        found = client.get_experiment_by_name(PROJECT)
        experiment = client.create_experiment(PROJECT) if found is None else found.experiment_id
        for run in runs:
            _to_mlflow(client, experiment, run)
    except MlflowException as error:
        raise UsageError(f"MLflow at {where}: {str(error).splitlines()[0]}") from error
    return f"wrote {counted(len(runs), 'run')} into the experiment {PROJECT} at {where}"


def _to_mlflow(client: Any, experiment: str, run: ReportedRun) -> None:
    from mlflow.entities import Metric, Param

    folder = str(run.state.folder.absolute())
    quoted = folder.replace("'", "")
    for earlier in client.search_runs([experiment], f"tags.`hpctrain.folder` = '{quoted}'"):
        client.delete_run(earlier.info.run_id)
    begun = min((maybe(one, "unix_time") or 0.0 for one in run.state.attempts), default=0.0)
    tags = {"mlflow.runName": run.name, "hpctrain.folder": quoted, **_facts(run)}
    made = client.create_run(experiment, start_time=round(1000 * begun), tags=tags).info.run_id
    parameters = [Param(_key(name), value[:_LONGEST]) for name, value in run.settings.items()]
    for start in range(0, len(parameters), _PARAMETERS):
        client.log_batch(made, params=parameters[start : start + _PARAMETERS])
    waiting: list[Any] = []
    last = begun
    for row in all_rows(run):
        last = maybe(row, "unix_time") or last
        waiting += [Metric(_key(name), value, round(1000 * last), row["step"]) for name, value in scalars_of(row)]
        if len(waiting) >= _BATCH:
            client.log_batch(made, metrics=waiting[:_BATCH])
            waiting = waiting[_BATCH:]
    if waiting:
        client.log_batch(made, metrics=waiting)
    if run.state.status != "running":
        client.set_terminated(made, _STATUS.get(run.state.status, "FAILED"), end_time=round(1000 * last))


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return "".join(each if each.isalnum() or each in "_-./ " else "_" for each in name)


def _facts(run: ReportedRun) -> dict[str, str]:
    """Return facts of a run that are no settings."""
    facts = {f"hpctrain.{name}": value for name, value in run.environments[-1].items()}
    return facts | {"hpctrain.status": run.state.status, "hpctrain.starts": str(run.state.starts)}


# Weights & Biases -----------------------------------------------------------------------------------------------------


def to_wandb(runs: Sequence[ReportedRun], output: Path) -> str:
    """Write an offline run of Weights & Biases for each run into a folder; ``WANDB_MODE=online`` sends it at once.

    The id follows from the folder of the run: with ``online``, a later report continues the same run.
    """
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    output.mkdir(parents=True, exist_ok=True)
    for run in runs:
        tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=hashlib.sha256(os.fsencode(run.state.folder.absolute())).hexdigest()[:16],
            dir=str(output),
            mode=mode,
            config={**run.settings, **_facts(run)},
            resume="allow" if mode == "online" else None,
        )
        for row in all_rows(run):
            values: Mapping[str, Any] = dict(scalars_of(row))
            tracked.log({**values, "_timestamp": maybe(row, "unix_time") or 0.0}, step=row["step"])
        tracked.finish(exit_code=int(run.state.status in ("failed", "killed")))
    wandb.teardown()  # waits for its process, which writes the last block of a file after finish() has returned
    sent = "sent" if mode == "online" else "wrote"
    how = "" if mode == "online" else f": wandb sync {output}/wandb/offline-run-*"
    return f"{sent} {counted(len(runs), 'run')} into {output}{how}"


# Each with the name of its default output in the folder of the first run.
TRACKERS: dict[str, tuple[Write, str]] = {
    "csv": (to_csv, "metrics.csv"),
    "tensorboard": (to_tensorboard, "tensorboard"),
    "mlflow": (to_mlflow, "mlflow"),
    "wandb": (to_wandb, "wandb"),
}
