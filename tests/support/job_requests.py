"""Requests for jobs: a usual one, and one with most options."""

from __future__ import annotations

from hpctrain.jobs.request import Request

ASKED = Request(
    config="a.toml",
    folder="runs/a",
    time="00:10:00",
    nodes=2,
    ranks_per_node=4,
    cpus_per_rank=3,
    modules=("m/1",),
    environment={"TEST_A": "b  c"},
    settings=("train.prompt=a b",),
)
MOST = Request(
    config="/scratch/me/a_b.toml",
    folder="/scratch/me/läufe/a",
    time="1-12:00:00",
    name="a.b-c",
    nodes=3,
    ranks_per_node=8,
    gpus_per_node=8,
    cpus_per_rank=6,
    account="m1234_g",
    partition="p1",
    memory="200G",
    margin=600,
)
