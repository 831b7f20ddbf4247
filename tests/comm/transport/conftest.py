"""Assertion rewriting for the suite, so that its failures show both sides of an assert."""

import pytest

pytest.register_assert_rewrite("suites.transports")
