"""Headless Chromium, driven over the pipe of its DevTools protocol: pages are opened, asked and photographed.

``python tests/chromium.py PAGE FOLDER`` leaves ``report-390.png`` and ``report-1280.png`` in a folder: what a phone and
a desk show of a report.

The protocol (https://chromedevtools.github.io/devtools-protocol) is JSON, each message ended by a zero byte; with
``--remote-debugging-pipe`` Chromium reads it from file descriptor 3 and writes it to 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 60
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip


def find_chromium() -> str | None:
    """Path of the browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a running browser.

    Attributes:
        complaints: what the page's console or the browser's log said, warnings included, since the last ``open``.
        requests: addresses that were asked for since then.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._last = write, read, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, path: Path, width: int, *, height: int = 900, dark: bool = False) -> None:
        """Loads a file as a screen of that width shows it, a phone's below 600 pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.complaints, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def photograph(self) -> bytes:
        """What is on the screen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, "Chromium ended" if ready else f"Chromium said nothing for {_SECONDS} s"
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        self._hear(message.get("method", ""), message.get("params", {}))
        return message

    def _hear(self, event: str, told: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            self.complaints.append(f"{event}: {json.dumps(told)[:500]}")


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """A browser of its own profile, gone afterwards."""
    commands, answers = os.pipe(), os.pipe()
    # out of the way of 3 and 4
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in (commands[0], answers[1])]

    def give() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it does not start for root
        process = subprocess.Popen(
            [path, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"], preexec_fn=give, close_fds=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (*theirs, commands[0], answers[1]):
            os.close(end)
        try:
            browser = Browser(commands[1], answers[0])
            yield browser
            browser._session = None
            browser.call("Browser.close")
        finally:
            os.close(commands[1])
            os.close(answers[0])
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(page: str, folder: str) -> int:
    """Photographs a report for the documentation; returns the exit code."""
    path = find_chromium()
    if path is None:
        print(f"error: none of {', '.join(NAMES)} is installed", file=sys.stderr)
        return 2
    with chromium(path) as browser:
        for width, height in ((390, 844), (1280, 900)):
            browser.open(Path(page), width, height=height)
            shot = Path(folder) / f"report-{width}.png"
            shot.write_bytes(browser.photograph())
            print(shot)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
