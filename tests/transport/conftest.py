"""Let failures in the suite show both sides of an assert."""

import pytest

pytest.register_assert_rewrite("suites.transports")
