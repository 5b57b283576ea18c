"""Drives Chromium through its developer protocol, for tests of pages and for pictures of them.

Messages go through a pair of pipes, so neither a port nor a library is needed. The protocol:
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from services.common.errors import DeviceError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_SECONDS = 120
"""Seconds after which a browser that still runs is ended, so that no call waits for ever."""


def find_browser() -> str | None:
    """Return the path of Chromium; None if none is on PATH."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """A Chromium without a window that shows one page. It ends, and its profile is removed, at the block's end.

    Raises `DeviceError` if no Chromium is installed, or it ends before it has answered.
    """

    def __init__(self) -> None:
        self._number, self._session, self._received = 0, "", b""
        self.events: list[dict[str, Any]] = []
        """Events that the browser has sent, such as `Network.requestWillBeSent`."""

    def __enter__(self) -> Self:
        found = find_browser()
        if found is None:
            raise DeviceError(f"no {', '.join(BROWSERS)} on PATH. Debian: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, commands = os.pipe()
        self._answers, theirs_out = os.pipe()
        self._commands = os.fdopen(commands, "wb")
        # A sandbox cannot be made as root; the pages are our own files.
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += [f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe", "about:blank"]
        # Chromium reads commands from file descriptor 3 and writes answers to 4.
        script = f'exec timeout {TIMEOUT_SECONDS} "$@" 3<&{theirs_in} 4>&{theirs_out} </dev/null >/dev/null 2>&1'
        command = ["bash", "-c", script, "bash", found, *options]
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        os.close(self._answers)
        self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result. Raises `DeviceError` if the browser refuses it or has ended."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        with contextlib.suppress(BrokenPipeError):  # nothing can be read either
            self._commands.write(json.dumps(message).encode() + b"\0")
            self._commands.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise DeviceError(f"the browser refused {method}: {answer['error'].get('message')}")
        return dict(answer["result"])

    def open(self, page: Path, width: int, height: int, *, is_dark: bool = False) -> None:
        """Show a file in a window of this size, and wait until it is loaded and drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.events.clear()
        self.send("Page.navigate", url=page.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.evaluate("0")
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page. A promise is awaited.

        Raises `DeviceError` if the expression throws.
        """
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            described = found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"])
            raise DeviceError(f"the page's script failed: {described}")
        return found["result"].get("value")

    def take_picture(self) -> bytes:
        """Return the part of the page that the window shows as a PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = os.read(self._answers, 2**16)
            if not more:
                raise DeviceError("the browser has ended.")
            self._received += more
        text, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(text))
