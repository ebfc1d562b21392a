"""The browser that the tests of a file share."""

import pytest

from . import browser as browsers


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = browsers.Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()
