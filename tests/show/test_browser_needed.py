"""Where there has to be a browser, its absence is a failure and no skip."""

import pytest

from . import browser as browsers


@pytest.fixture
def nothing_in_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(browsers.REQUIRED, raising=False)
    return monkeypatch


def test_without_one_tests_are_skipped(nothing_in_path):
    assert "chromium" in browsers.why_not()


def test_where_one_is_required_tests_run_and_fail(nothing_in_path, tmp_path):
    nothing_in_path.setenv(browsers.REQUIRED, "1")
    assert browsers.why_not() == ""
    with pytest.raises(AssertionError, match="DPCORE_TEST_BROWSER is set: needs one of chromium"):
        browsers.Browser(tmp_path)
