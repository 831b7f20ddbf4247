"""Every scheduler passes the suite of schedulers."""

from suites.schedulers import SchedulerSuite


class TestSchedulers(SchedulerSuite):
    """The suite on every row of its table."""
