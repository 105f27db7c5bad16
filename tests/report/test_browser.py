"""The page in a real browser: Chromium, driven through its debugging pipe with the standard library alone.

Every test fails on a console message, an uncaught exception, a blocked resource or a request for anything
but the page.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ergoflow.report.html import render
from ergoflow.report.runs import RunView

pytestmark = pytest.mark.browser

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
]
#: Debian and Fedora, Arch, Google's own packages, macOS Homebrew.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 30.0


class Browser:
    """One tab of a headless Chromium; `complaints` gathers all it has to say against the page."""

    def __init__(self, binary: str, profile: Path) -> None:
        # Chromium reads commands from descriptor 3 and answers on 4, messages ending in a zero byte.
        command_read, self._command = os.pipe()
        self._answer, answer_write = os.pipe()
        # Above 10, so that neither end is overwritten while the other is moved to its place.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command_read, answer_write)]
        actions = [(os.POSIX_SPAWN_DUP2, ends[0], 3), (os.POSIX_SPAWN_DUP2, ends[1], 4)]
        actions += [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
        arguments = [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # A group of its own, so that closing ends its helper processes and nothing else.
        self._pid = os.posix_spawn(binary, arguments, os.environ, file_actions=actions, setpgroup=0)
        for end in (command_read, answer_write, *ends):
            os.close(end)
        os.set_blocking(self._answer, False)
        self._buffer, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and wait for its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise AssertionError(f"no answer to {method} within {PATIENCE_S} s")

    def open(self, page: Path, *, width: int = 1280, height: int = 900) -> None:
        """Show a file at a window size and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete' && document.querySelector('h1')")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return when a JavaScript condition holds."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A real key press on whatever has the focus."""
        codes = {" ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}
        text = {"text": {" ": " ", "Enter": "\r"}.get(key, key)} if len(key) == 1 or key == "Enter" else {}
        shared = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, scrolled into view."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        middle = "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        box = self.run(f"{middle}(document.querySelector({selector!r}).getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """The window, or the whole page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def close(self) -> None:
        """End this Chromium and its own processes."""
        os.close(self._command)
        os.close(self._answer)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._pid, sent)
            except ProcessLookupError:
                break
            end = time.monotonic() + 5
            while time.monotonic() < end:
                if os.waitpid(self._pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.02)

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if b"\0" not in self._buffer:
                try:
                    self._buffer += os.read(self._answer, 1 << 20)
                except BlockingIOError:
                    time.sleep(0.002)
                continue
            text, self._buffer = self._buffer.split(b"\0", 1)
            message = json.loads(text)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(parameters)[:600])
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:200])


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    binary = next((path for name in NAMES if (path := shutil.which(name))), None)
    if binary is None:
        reason = f"no Chromium on PATH (looked for {', '.join(NAMES)}); apt-get install chromium"
        print(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(binary, Path(profile))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(make_run: Callable[..., RunView], tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [
        make_run("best", skill=0.02, dataset="kf256"),
        make_run("middle", skill=0.1, dataset="kf256"),
        make_run("last", skill=0.5, dataset="kf256"),
    ]
    metrics = runs[1].scores["metrics"]
    metrics["me_lrw"]["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    # Under this variant the order of the first two models is the other way round.
    metrics["me_ape@1..16"]["rows"]["model"].update(value=1e-4)
    return render(runs, tmp_path_factory.mktemp("report"), title="Browser test")


@pytest.fixture
def opened(tab: Browser, page: Path) -> Iterator[Browser]:
    tab.complaints.clear()
    tab.requests.clear()
    _prefer(tab, "light")
    tab.open(page)
    tab.run("localStorage.clear()")
    tab.open(page)
    tab.wait("document.querySelector('.player').dataset.frame !== undefined")
    yield tab
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(("file://", "data:"))] == []


def _prefer(tab: Browser, scheme: str, *, motion: str = "reduce") -> None:
    """What the reader's system asks of pages; frames that move by themselves would be a race with the tests."""
    wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
    tab.call("Emulation.setEmulatedMedia", features=[{"name": name, "value": wish} for name, wish in wishes.items()])


def _pixels(tab: Browser, tile: int) -> list[int]:
    # A copy, because Chromium warns about canvases that are shown and often read.
    copy = "const d = Object.assign(document.createElement('canvas'), {width: c.width, height: c.height})"
    read = "const x = d.getContext('2d', {willReadFrequently: true}); x.drawImage(c, 0, 0)"
    data = "return [...x.getImageData(0, 0, c.width, c.height).data]"
    return tab.run(f"(c => {{ {copy}; {read}; {data} }})(document.querySelectorAll('.tile canvas')[{tile}])")


def _choose(tab: Browser, selector: str, value: str) -> None:
    change = f"m => {{ m.value = {value!r}; m.dispatchEvent(new Event('change')) }}"
    tab.run(f"({change})(document.querySelector({selector!r}))")


def _order(tab: Browser) -> list[str]:
    return tab.run(
        "[...document.querySelector('.scores tbody').rows].map(r => r.cells[0].firstChild.textContent.trim())"
    )


def test_the_harness_hears_errors_and_the_page_forbids_the_network(tab: Browser, page: Path) -> None:
    tab.open(page)
    tab.complaints.clear()
    tab.run("console.error('heard')")
    assert len(tab.complaints) == 1
    tab.run("new Promise(done => { const i = new Image(); i.onerror = done; i.src = 'http://127.0.0.1:9/x.png' })")
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def test_player_shows_other_pixels_at_another_frame(opened: Browser) -> None:
    opened.run("document.querySelector('.player').focus()")
    opened.press("Home")
    before = [_pixels(opened, tile) for tile in range(3)]
    opened.press("ArrowRight")
    opened.press("ArrowRight")
    assert opened.run("document.querySelector('.player').dataset.frame") == "2"
    assert opened.run("document.querySelector('.readout').textContent") == "step 2 · 0.2 s"
    assert all(_pixels(opened, tile) != before[tile] for tile in range(3))
    opened.press("Home")
    assert [_pixels(opened, tile) for tile in range(3)] == before


def test_player_opens_where_forecasts_have_parted_and_stays_there_for_those_who_want_less_motion(
    opened: Browser,
) -> None:
    frame, last = "document.querySelector('.player').dataset.frame", "document.querySelector('.frame').max"
    middle = opened.run(f"Math.floor((Number({last}) + 1) / 2)")
    opened.run("document.querySelector('.player').scrollIntoView({behavior: 'instant'})")
    time.sleep(0.4)
    assert opened.run(f"Number({frame})") == middle
    error = set(zip(*[iter(_pixels(opened, 2))] * 4, strict=True))
    assert len(error) > 1


def test_player_plays_by_itself_in_sight_until_the_reader_takes_over(opened: Browser, page: Path) -> None:
    playing = "document.querySelector('.play').textContent === 'Pause'"
    scroll = "window.scrollTo({{top: {}, behavior: 'instant'}})"
    place = "document.querySelector('.player').getBoundingClientRect().top + scrollY"
    _prefer(opened, "light", motion="no-preference")
    opened.open(page)
    opened.wait("document.querySelector('.player').dataset.frame !== undefined")
    time.sleep(0.2)
    assert not opened.run(playing)
    for top, expected in ((place, True), ("0", False), (place, True)):
        opened.run(scroll.format(top))
        opened.wait(f"({playing}) === {str(expected).lower()}")
    opened.click(".player .play")
    assert not opened.run(playing)
    opened.run(scroll.format("0"))
    time.sleep(0.2)
    opened.run(scroll.format(place))
    time.sleep(0.2)
    assert not opened.run(playing)


def test_player_plays_and_pauses(opened: Browser) -> None:
    start = opened.run("document.querySelector('.player').dataset.frame")
    opened.click(".player .play")
    opened.wait(f"Number(document.querySelector('.player').dataset.frame) >= {start} + 3")
    assert opened.run("document.querySelector('.play').textContent") == "Pause"
    opened.click(".player .play")
    stopped = opened.run("document.querySelector('.player').dataset.frame")
    time.sleep(0.4)
    assert opened.run("document.querySelector('.player').dataset.frame") == stopped
    assert opened.run("document.querySelector('.play').textContent") == "Play"


def test_a_button_whose_label_changes_has_no_state_besides(opened: Browser) -> None:
    """Else a screen reader would say "Pause, pressed" of what is playing."""
    for button in ("#theme", ".player .play"):
        label = f"document.querySelector({button!r}).textContent"
        before = opened.run(label)
        opened.click(button)
        assert opened.run(label) != before
    assert opened.run("document.querySelectorAll('[aria-pressed]').length") == 0


def test_speed_slider_sets_the_pace(opened: Browser) -> None:
    def frames_in_a_second(speed: int) -> int:
        opened.run(f"document.querySelector('.speed').value = {speed}; document.querySelector('.player').focus()")
        opened.press("Home")
        opened.press(" ")
        time.sleep(1.0)
        opened.press(" ")
        return int(opened.run("document.querySelector('.player').dataset.frame"))

    assert frames_in_a_second(2) <= 4
    assert frames_in_a_second(15) >= 5


def test_scrubber_and_model_boxes_change_what_is_shown(opened: Browser) -> None:
    opened.run("f = document.querySelector('.frame'); f.value = 7; f.dispatchEvent(new Event('input'))")
    assert opened.run("document.querySelector('.player').dataset.frame") == "7"
    assert opened.run("document.querySelectorAll('.tile').length") == 5
    opened.click(".chips label:last-of-type input")
    opened.wait("document.querySelectorAll('.tile').length === 7")


def test_a_header_sorts_both_ways_and_keeps_the_unmeasured_last(opened: Browser) -> None:
    numbers = ["truth against truth", "best", "middle", "Ours", "persistence", "UNO", "climatology", "MWT"]
    numbers += ["FactFormer", "zero", "MNO", "last"]
    sorting = "document.querySelector('.scores th:nth-child(3)').getAttribute('aria-sort')"
    opened.click(".scores th:nth-child(3) .sort")
    assert _order(opened) == numbers
    assert opened.run(sorting) == "ascending"
    opened.click(".scores th:nth-child(3) .sort")
    assert [name for name in _order(opened) if name in ("best", "middle", "last")] == [
        "last",
        "middle",
        "best",
    ]
    assert opened.run(sorting) == "descending"
    opened.click(".scores th:nth-child(2) .sort")
    # The paper prints no one-step error: its rows come last in either direction.
    assert _order(opened)[-1] == "Ours"
    opened.click(".scores th:nth-child(2) .sort")
    assert _order(opened)[-1] == "Ours"


def test_a_failed_score_sorts_after_every_number(opened: Browser) -> None:
    header = "[...document.querySelectorAll('.scores th')].findIndex(h => h.textContent.startsWith('ME-LRw')) + 1"
    opened.click(f".scores th:nth-child({opened.run(header)}) .sort")
    order = _order(opened)
    assert order[-1] == "middle"
    assert opened.run("document.querySelector('.cell.failed b').textContent") == "failed"


def test_a_variant_replaces_the_column_and_its_order(opened: Browser) -> None:
    opened.click("th:has(.variant) .sort")
    assert [name for name in _order(opened) if name in ("best", "middle")] == ["best", "middle"]
    _choose(opened, ".variant", "me_ape@1..16")
    assert [name for name in _order(opened) if name in ("best", "middle")] == ["middle", "best"]


def test_theme_follows_the_system_and_the_button(opened: Browser) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.drawing svg text')).fill"
    light = opened.run(ground), opened.run(ink)
    _prefer(opened, "dark")
    dark = opened.run(ground), opened.run(ink)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    opened.click("#theme")
    assert (opened.run(ground), opened.run(ink)) == light
    _prefer(opened, "light")
    opened.click("#theme")
    assert (opened.run(ground), opened.run(ink)) == dark


def test_the_name_on_a_card_leads_to_its_definition(opened: Browser) -> None:
    shown = "(e => e.checkVisibility() && e.getBoundingClientRect().top < innerHeight && e.textContent)"
    assert opened.run("document.querySelector('.card a').textContent") == "Rel. L2, τ = 1"
    opened.click(".card a")
    opened.wait("location.hash")
    opened.wait(f"{shown}(document.getElementById(location.hash.slice(1))) === 'Rel. L2, τ = 1'")


def test_the_menu_shows_the_maps_of_the_chosen_run_only(opened: Browser) -> None:
    figures = "[...document.querySelectorAll('figure[data-run]')]"
    visible = f"{figures}.filter(f => f.offsetHeight).map(f => f.dataset.run)"
    assert set(opened.run(visible)) == {"best"}
    _choose(opened, "select.runs", "last")
    assert set(opened.run(visible)) == {"last"}


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(opened: Browser, page: Path, width: int) -> None:
    opened.open(page, width=width)
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert opened.run("document.documentElement.scrollWidth") <= width


def test_the_page_fits_on_paper(opened: Browser, page: Path) -> None:
    # A4 with these margins is 182 mm, 688 CSS pixels, wide.
    opened.open(page, width=688)
    opened.call("Emulation.setEmulatedMedia", media="print")
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    # As many headline metrics as a Kolmogorov flow has.
    opened.run(
        "for (const row of document.querySelector('.scores').rows) "
        "while (row.cells.length < 16) row.append(row.cells[3].cloneNode(true))"
    )
    assert opened.run("document.querySelector('.scores').tHead.rows[0].cells.length") == 16
    assert opened.run("document.documentElement.scrollWidth") <= 688
    opened.call("Emulation.setEmulatedMedia", media="")
    assert base64.b64decode(opened.call("Page.printToPDF")["data"]).startswith(b"%PDF")


def test_without_scripts_every_map_is_there_and_no_dead_control(tab: Browser, page: Path) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.call("Page.navigate", url=page.as_uri())
        shown = "[...document.querySelectorAll({!r})].filter((e) => e.checkVisibility()).length"
        tab.wait(f"document.readyState === 'complete' && {shown.format('figure[data-run]')} > 0")
        assert tab.run(shown.format("figure[data-run]")) == tab.run(
            "document.querySelectorAll('figure[data-run]').length"
        )
        for control in ("#theme", ".menu select", "select.variant", ".play"):
            assert tab.run(f"document.querySelectorAll({control!r}).length") > 0
            assert tab.run(shown.format(control)) == 0
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)
