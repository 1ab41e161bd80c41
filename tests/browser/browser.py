"""A headless Chromium that a test steers: DevTools messages over a pipe, no network and no driver."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

SECONDS = 60
"""How long an answer may take: far longer than any does, so that no test depends on load."""
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "ArrowRight": (39, ""), "Home": (36, "")}
_VIRTUAL = {"+": 187, "-": 189}


class BrowserError(Exception):
    """The browser ended, did not answer, or refused."""


class Browser:
    """One process of Chromium."""

    def __init__(self, path: str, profile: Path) -> None:
        to_read, to_write = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4; numbers from 10 on are in nobody's way.
        child = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (to_read[0], to_write[1])]
        self._write, self._read = to_read[1], to_write[0]
        script = f'exec "$@" 3<&{child[0]} 4>&{child[1]} {child[0]}<&- {child[1]}>&-'
        command = ["bash", "-c", script, "bash", path, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for number in (to_read[0], to_write[1], *child):
            os.close(number)
        os.set_blocking(self._read, False)
        self._left, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._left:
            if self._process.poll() is not None:
                raise BrowserError(f"Chromium ended with code {self._process.returncode}")
            if time.monotonic() > end:
                raise BrowserError(f"no answer in {SECONDS} s")
            try:
                self._left += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


class Page:
    """One page that is open, with all that it asked for and complained of."""

    def __init__(
        self, browser: Browser, file: Path, *, dark: bool = False, width: int = 1200, height: int = 900
    ) -> None:
        self.browser = browser
        self._first = len(browser.events)
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + SECONDS
        while self.run("document.readyState") != "complete" and time.monotonic() < end:
            time.sleep(0.01)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def run(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression holds: a page may answer a key behind the answer to the protocol. Hangs end after
        minutes."""
        self.run(
            "new Promise((done, fail) => { const end = Date.now() + 3e5; const look = () => "
            f"({expression}) ? done(true) : Date.now() > end ? fail('never') : setTimeout(look, 20); look(); }})"
        )

    def press(self, key: str) -> None:
        """Press and release a key."""
        code, text = _KEYS.get(key, (_VIRTUAL.get(key, ord(key[0].upper())), key))
        base = {"key": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **base, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **base)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of events of this page so far."""
        self.run("1")  # all before its answer have arrived
        mine = (each for each in self.browser.events[self._first :] if each.get("sessionId") == self.session)
        return [each["params"] for each in mine if each["method"] in methods]

    def complaints(self) -> list[str]:
        """What it wrote to the console, exceptions, and what the policy blocked."""
        calls = self.events("Runtime.consoleAPICalled")
        return [json.dumps(each) for each in (*calls, *self.events("Runtime.exceptionThrown", "Log.entryAdded"))]

    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return [each["request"]["url"] for each in self.events("Network.requestWillBeSent")]

    def picture(self, clip: dict[str, float]) -> bytes:
        """A WebP picture of a rectangle of the page, also of what is not in sight."""
        answer = self.send(
            "Page.captureScreenshot", format="webp", quality=70, captureBeyondViewport=True, clip=clip
        )  # fmt: skip
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self._target)
