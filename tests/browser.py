"""Chromium without a window, driven through its DevTools pipe: the standard library is enough."""

import base64
import json
import os
import select
import shutil
import subprocess
import time


def find_chromium():
    """Return the path of the browser, None where it, or the shell that starts it, is not installed."""
    if shutil.which("bash") is None:
        return None
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A browser that can reach nothing but files and this machine."""

    def __init__(self, profile):
        self._read, out = os.pipe()
        into, self._write = os.pipe()
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio"),
            *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ]
        # The pipe is file 3 for commands and file 4 for answers; dash, unlike bash, knows no files above 9.
        command = ["bash", "-c", f'exec "$@" 3<&{into} 4>&{out}', "bash", find_chromium(), *options, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(into, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(into)
        os.close(out)
        self._rest, self._number, self.events = b"", 0, []

    def close(self):
        try:
            self.call("Browser.close", timeout=5)
            self._process.wait(timeout=10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, *, session=None, timeout=20, **parameters):
        """Send a command and return its result; what happens meanwhile is kept in ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                if "navigated" in str(answer.get("error")):
                    raise Navigated(answer["error"])
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(
        self,
        address,
        *,
        width=1280,
        height=900,
        dark=False,
        ready="document.documentElement.dataset.ready === 'yes'",
        hurried=False,
    ):
        """Open a page, with shorter timers if ``hurried``, and wait until it has drawn itself or something is true."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for name in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{name}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        if hurried:
            source = "const wait = setTimeout; window.setTimeout = (act, ms, ...more) => wait(act, ms / 10, ...more);"
            page.call("Page.addScriptToEvaluateOnNewDocument", source=source)
        page.call("Page.navigate", url=address)
        page.wait(ready)
        return page

    def _receive(self, end):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise ConnectionError(f"the browser ended with exit code {self._process.poll()}")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Navigated(Exception):
    """The page that was asked gave way to its next one meanwhile."""


class Page:
    """A page of the browser."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def call(self, method, **parameters):
        return self._browser.call(method, session=self._session, **parameters)

    def value(self, expression):
        """Return what JavaScript makes of an expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression, *, timeout=20):
        """Wait until an expression is true; between two pages it may have no document to ask."""
        end = time.monotonic() + timeout
        while not self._is_true(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def _is_true(self, expression):
        try:
            return self.value(f"(() => {{ try {{ return {expression}; }} catch {{ return false; }} }})()")
        except Navigated:
            return False

    def choose(self, name, value):
        """Choose in one of the page's lists, as a user does."""
        self.value(
            f"(() => {{ const list = document.querySelector('[data-state={name}]'); list.value = {json.dumps(value)};"
            "list.dispatchEvent(new Event('change')); })()"
        )

    def move(self, selector, across, down):
        """Move the pointer to a place inside an element, as shares of its width and height."""
        x, y, width, height = self.value(
            f"(() => {{ const it = document.querySelector('{selector}'); it.scrollIntoView({{block: 'center'}});"
            "const box = it.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + across * width, y=y + down * height)

    def problems(self):
        """Return exceptions and messages of the console, and addresses asked for that are no files of this machine."""
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        said = [event for event in mine if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        said += [event for event in mine if event["method"] == "Runtime.consoleAPICalled"]
        asked = [event["params"]["request"]["url"] for event in mine if event["method"] == "Network.requestWillBeSent"]
        return said + [url for url in asked if not url.startswith(("file:", "data:", "http://127.0.0.1:"))]

    def screenshot(self, path, *, height=None):
        clip = {}
        if height is not None:
            width = self.value("innerWidth")
            clip = {
                "clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
                "captureBeyondViewport": True,
            }
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))
        return path
