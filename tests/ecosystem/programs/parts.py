"""Training as a whole and in parts, for programs with a run folder: ``FACTS`` of both are printed by one rank."""

import json
import os
import sys

import torch

from hpctrain.train.control import stop_request


def train_in_parts(train, folder, stops):
    """Train once as a whole, and once in another folder with stops at these steps; return the facts of both."""
    whole = train(os.path.join(folder, "whole"), 0)
    for stop_at in stops:
        try:
            train(os.path.join(folder, "parts"), stop_at)
            raise AssertionError("not stopped")
        except SystemExit as left:
            assert left.code == 75, left.code
        stop_request.signal = None
        torch.rand(7)
    return {"whole": whole, "parts": train(os.path.join(folder, "parts"), 0)}


def main(train, stops):
    """Train into the folder that the command line names, and print facts."""
    folder, in_parts = sys.argv[1], "--parts" in sys.argv
    stop_at = int(os.environ.get("STOP_AT", "0"))
    facts = train_in_parts(train, folder, stops) if in_parts else train(folder, stop_at)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print("FACTS", json.dumps(facts), flush=True)
