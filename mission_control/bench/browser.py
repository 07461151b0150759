"""A real browser without a screen: Chromium, by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from tornado.ioloop import IOLoop
from tornado.websocket import WebSocketClientConnection, websocket_connect

STARTS_S = 60.0
ANSWER_S = 30.0


def chromium() -> str | None:
    """Return the program; ``None``: there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def browser(width: int = 1400, height: int = 900) -> Iterator[Page]:
    """One page of a browser that has nothing of others.

    Raises:
        FileNotFoundError: There is no Chromium.
        TimeoutError: It does not start.
    """
    program = chromium()
    if program is None:
        raise FileNotFoundError("there is no chromium on the path (Debian: chromium)")
    with TemporaryDirectory(prefix="mission-browser-", ignore_cleanup_errors=True) as folder:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        options += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--force-device-scale-factor=1"]
        process = subprocess.Popen(
            [program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        loop = IOLoop(make_current=False)
        try:
            port = _port(Path(folder))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=ANSWER_S) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]

            async def connect() -> WebSocketClientConnection:
                return await websocket_connect(pages[0]["webSocketDebuggerUrl"], max_message_size=64 << 20)

            page = Page(loop, loop.run_sync(connect, timeout=ANSWER_S), psutil.Process(process.pid))
            page.call("Page.enable")
            yield page
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            psutil.wait_procs(children, timeout=5)
            loop.close(all_fds=True)


def _port(folder: Path) -> int:
    """Return the port that the browser writes down when it listens."""
    file, end = folder / "DevToolsActivePort", time.monotonic() + STARTS_S
    while time.monotonic() < end:
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise TimeoutError(f"chromium does not start within {STARTS_S:.0f} s")


class Page:
    """What a person has before them."""

    def __init__(self, loop: IOLoop, socket: WebSocketClientConnection, process: psutil.Process):
        self.loop, self.socket, self.process = loop, socket, process
        self.number = 0
        self.errors: list[str] = []
        """What scripts raised."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol.

        Raises:
            RuntimeError: The browser refuses.
            TimeoutError: It does not answer.
        """
        self.number += 1
        number = self.number

        async def asked() -> dict[str, Any]:
            await self.socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
            while True:
                message = await self.socket.read_message()
                if message is None:
                    raise RuntimeError("the browser has ended")
                answer: dict[str, Any] = json.loads(message)
                if answer.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(str(answer["params"]["exceptionDetails"]))
                if answer.get("id") == number:
                    return answer

        answer = self.loop.run_sync(asked, timeout=ANSWER_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, address: str) -> None:
        """Go there; what scripts raise from now on is in :attr:`errors`."""
        self.call("Runtime.enable")
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Return the value of an expression.

        Raises:
            RuntimeError: It raises.
        """
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true, and return it.

        Raises:
            TimeoutError: It is not, in time; the text has what the page shows.
        """
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: {self.run('document.body.innerText')} {self.errors}")
            time.sleep(0.1)
        return found

    def press(self, key: str) -> None:
        """Press a key, as a person does."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40}
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = codes.get(key, ord(key[0].upper()))
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """Write what there is to see, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def dark(self, is_dark: bool) -> None:
        """Have the whole system dark, or light."""
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def cpu_seconds(self) -> float:
        """Of all processes of the browser."""
        total = 0.0
        for process in [self.process, *self.process.children(recursive=True)]:
            try:
                total += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        return total
