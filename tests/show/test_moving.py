"""Moving about on the page of dpcore show: wheel, drag and fingers do what the page says."""

import pytest

from .browser import needs_browser
from .traces import page_of, write_trace

pytestmark = needs_browser

SPAN = "page.view.end - page.view.begin"


@pytest.fixture
def place(browser, tmp_path):
    """A page that is open, and a place on its timeline: the middle, a little below the top."""
    browser.size(1280, 500)
    browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json", ranks=4, steps=5)))
    yield browser.run("""(() => { const box = page.timelines[0].canvas.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + 60]; })()""")
    assert browser.problems == []
    browser.size(1280, 900)


def time_at(browser, x):
    """The time that is drawn there, in nanoseconds of the run."""
    return browser.run(f"""(() => {{ const t = page.timelines[0], s = t.scale;
      const at = {x} - t.canvas.getBoundingClientRect().x;
      return s.begin + (at - s.left) / (s.right - s.left) * (s.end - s.begin); }})()""")


def settle(browser):
    """Until events that were sent have arrived and a frame is drawn."""
    browser.run("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")


def test_the_hint_says_what_the_wheel_does(browser, place):
    hint = browser.text("#detail .hint")
    assert "Drag to pan; pinch, or turn the wheel with Ctrl, to zoom" in hint
    assert "After a click into the timeline the wheel alone zooms; before, it scrolls" in hint


def test_the_wheel_scrolls_the_page_until_one_has_clicked(browser, place):
    span = browser.run(SPAN)
    browser.turn_wheel(*place, down=120)
    settle(browser)
    assert browser.run(SPAN) == span
    assert browser.run("window.scrollY") > 0
    browser.run("window.scrollTo(0, 0)")
    browser.click(*place)
    browser.turn_wheel(*place, down=120)
    settle(browser)
    assert browser.run(SPAN) > 1.1 * span
    assert browser.run("window.scrollY") == 0


@pytest.mark.parametrize(("down", "smaller"), [(-240, True), (240, False)])
def test_wheel_with_control_zooms_around_the_pointer(browser, place, down, smaller):
    x, y = place[0] + 200, place[1]
    span, under = browser.run(SPAN), time_at(browser, x)
    browser.turn_wheel(x, y, down=down, with_control=True)
    settle(browser)
    assert (browser.run(SPAN) < 0.9 * span) == smaller
    assert time_at(browser, x) == pytest.approx(under, abs=browser.run(SPAN) / 500)


def test_a_wheel_across_pans(browser, place):
    span, begin = browser.run(SPAN), browser.run("page.view.begin")
    browser.turn_wheel(*place, across=200)
    settle(browser)
    assert browser.run(SPAN) == pytest.approx(span)
    assert browser.run("page.view.begin") > begin + 0.1 * span


def test_a_drag_pans_what_is_held(browser, place):
    x, y = place
    span, under = browser.run(SPAN), time_at(browser, x)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    for moved in (40, 90, 150):
        browser.mouse("mouseMoved", x - moved, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 150, y, button="left", clickCount=1)
    settle(browser)
    assert browser.run(SPAN) == pytest.approx(span)
    assert time_at(browser, x - 150) == pytest.approx(under, abs=span / 500)
    assert browser.run("page.timelines[0].selected") is None, "a drag is no click"


@pytest.mark.parametrize("apart", [True, False])
def test_two_fingers_zoom(browser, place, apart):
    browser.size(390, 844, phone=True)
    settle(browser)
    x, y = browser.run("""(() => { const box = page.timelines[0].canvas.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + 60]; })()""")
    ways = [30, 50, 70, 90, 110]
    ways = ways if apart else ways[::-1]
    span, middle = browser.run(SPAN), time_at(browser, x)
    browser.touch("touchStart", (x - ways[0], y), (x + ways[0], y))
    for way in ways[1:]:
        browser.touch("touchMove", (x - way, y), (x + way, y))
    browser.touch("touchEnd")
    settle(browser)
    assert browser.run(SPAN) == pytest.approx(span * ways[0] / ways[-1], rel=0.02)
    assert time_at(browser, x) == pytest.approx(middle, abs=browser.run(SPAN) / 20)


def test_one_finger_pans(browser, place):
    browser.size(390, 844, phone=True)
    settle(browser)
    x, y = browser.run("""(() => { const box = page.timelines[0].canvas.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + 60]; })()""")
    span, begin = browser.run(SPAN), browser.run("page.view.begin")
    browser.touch("touchStart", (x, y))
    for moved in (30, 60, 100):
        browser.touch("touchMove", (x - moved, y))
    browser.touch("touchEnd")
    settle(browser)
    assert browser.run(SPAN) == pytest.approx(span)
    assert browser.run("page.view.begin") > begin + 0.1 * span
