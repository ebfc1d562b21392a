"""A headless Chromium that tests talk to, through a pair of pipes and nothing else.

``--remote-debugging-pipe`` makes it read commands from descriptor 3 and answer on 4, as JSON with a
zero byte behind each message: no port, no driver, no further package.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest

REQUIRED = "DPCORE_TEST_BROWSER"  # in the environment: "1" where there has to be a browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
_NONE = f"needs one of {', '.join(NAMES)} in PATH"
_PATIENCE = 60.0  # seconds for any answer


def why_not():
    """Why this machine need have no browser for us, or nothing: then tests use one or fail."""
    if _executable() or os.environ.get(REQUIRED) == "1":
        return ""
    return _NONE


def _executable():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")


class Browser:
    """One browser with one page. ``problems`` collects what its console complained of."""

    def __init__(self, profile, width=1280, height=900):
        executable = _executable()
        assert executable, f"{REQUIRED} is set: {_NONE}"
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Not 3 or 4 themselves: one would be overwritten before it was copied.
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser, from_browser))
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--no-first-run", "--hide-scrollbars", "--disable-extensions"]
        flags += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"]
        command = [executable, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        place = f"import os, sys; os.dup2({read}, 3); os.dup2({write}, 4); "
        become = place + "os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", become, *command], pass_fds=(read, write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (to_browser, from_browser, read, write):
            os.close(fd)
        self._received = b""
        self._number = 0
        self._session = None
        self.problems = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(width, height)

    # ---- the wire --------------------------------------------------------------------------------

    def send(self, method, **parameters):
        """The result of a command of the DevTools protocol: for our page, once there is one."""
        return self._send(method, parameters, {"sessionId": self._session} if self._session else {})

    def _send(self, method, parameters, receiver):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **receiver}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline):
        while b"\0" not in self._received:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._in], [], [], max(0, left))
            assert ready, f"no answer of the browser within {_PATIENCE} s"
            data = os.read(self._in, 1 << 16)
            assert data, f"the browser ended with {self._process.poll()}"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        details = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(details["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                self.problems.append(str(details["args"]))
            case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                self.problems.append(details["entry"]["text"])
            case "Network.requestWillBeSent":
                url = details["request"]["url"]
                if not url.startswith(("file:", "data:", "about:", "blob:")):
                    self.problems.append(f"the page asked for {url}")

    # ---- what tests do ---------------------------------------------------------------------------

    def size(self, width, height, phone=False):
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)

    def colours(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, path):
        """Loads a page of ours and waits until it has drawn. Milliseconds from the beginning of the
        navigation to its first frame, by its own clock."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            state = self.run("document.body ? {...document.body.dataset} : {}")
            assert "failed" not in state, state["failed"]
            if "ready" in state:
                return float(state["ready"])
            time.sleep(0.05)
        raise AssertionError(f"{path} was not ready within {_PATIENCE} s; {self.problems}")

    def processor_ms(self):
        """Processor time that each running process of the browser has used so far, by its id."""
        processes = self._send("SystemInfo.getProcessInfo", {}, {})["processInfo"]
        return {process["id"]: 1000 * process["cpuTime"] for process in processes}

    def run(self, script):
        """The value of an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def press(self, *keys):
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, **_text_of(kind, key))

    def mouse(self, kind, x, y, **more):
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def turn_wheel(self, x, y, across=0, down=0, with_control=False):
        self.mouse(
            "mouseWheel", x, y, deltaX=across, deltaY=down, modifiers=2 if with_control else 0
        )

    def touch(self, kind, *fingers):
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(fingers)]
        self.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def screenshot(self, path, whole=True):
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))

    def close(self):
        with contextlib.suppress(AssertionError, BrokenPipeError):
            self._session = None
            self.send("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


def _text_of(kind, key):
    return {"text": key} if kind == "keyDown" and len(key) == 1 else {}
