"""What survivors must hear within a second or two is heard in time on half a machine."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        is_patient = item.get_closest_marker("patient") is not None
        if "tests/faults/" in item.path.as_posix() and not is_patient:
            item.add_marker(pytest.mark.hurried)
