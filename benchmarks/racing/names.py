"""Names of the members in tables, plots and results."""

from __future__ import annotations

DIGITS, GPT = "digits", "gpt"
TASKS = (DIGITS, GPT)

DDP = "ddp"
EASGD, EASGD_PERIOD = "easgd", "easgd period 4"
EASGD_APART, ROUND_ROBIN = "easgd asynchronous", "easgd round-robin"
LOCAL_SGD = "local sgd"
SERVER, LOCKED, HOGWILD = "server", "server with lock", "hogwild"

MEMBERS = (DDP, EASGD, EASGD_PERIOD, EASGD_APART, ROUND_ROBIN, LOCAL_SGD, SERVER, LOCKED, HOGWILD)
# Their names on the command line.
WORDS = {
    "ddp": DDP,
    "easgd": EASGD,
    "easgd-4": EASGD_PERIOD,
    "easgd-async": EASGD_APART,
    "easgd-turns": ROUND_ROBIN,
    "local-sgd": LOCAL_SGD,
    "server": SERVER,
    "server-lock": LOCKED,
    "hogwild": HOGWILD,
}
SILENT = "no exchange"  # the reference: workers that do not communicate
