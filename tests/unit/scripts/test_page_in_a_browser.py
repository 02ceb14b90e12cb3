"""The page in a real browser: `make browser` runs this with the Chromium of the system."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefrl.scripts.report import LivePage, serve
from prefrl.scripts.report_page import page
from tests.unit.scripts.test_report import rollout, run_folder, write_batch, write_metrics

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def shown(chromium: Any) -> Iterator[Any]:
    """A page that must not have an error."""
    problems: list[str] = []
    tab = chromium.new_page()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield tab
    tab.close()
    assert problems == []


def folders_of_two_runs(folder: Path) -> list[Path]:
    folders = [run_folder(folder / name) for name in "ab"]
    for number, run in enumerate(folders):
        rows = [{"step": i, "reward": (i * 7919 % 13) / 13 + number, "loss": 1.0} for i in range(1, 60)]
        write_metrics(run, rows)
        write_batch(run, 3, [rollout(0, f"words of {run.name}", 0.5), rollout(1, "x", 1.0, prompt="2+2=")])
    return folders


def opened(tab: Any, folders: list[Path], file: Path) -> None:
    file.write_text(page(folders), encoding="utf-8")
    tab.goto(file.as_uri())


def test_curves_are_smoothed_and_runs_hidden_as_chosen(shown: Any, tmp_path: Path) -> None:
    opened(shown, folders_of_two_runs(tmp_path), tmp_path / "page.html")
    plot = shown.locator('.chart[data-metric="reward"] .plot')
    assert plot.locator("path").count() == 2
    raw = plot.locator("path.line0").get_attribute("d")
    shown.locator("#smoothing").focus()
    for _ in range(45):
        shown.keyboard.press("ArrowRight")
    assert plot.locator("path.band").count() == plot.locator("path.raw").count() == 2
    assert plot.locator("path.raw.line0").get_attribute("d") == raw
    heights = [
        float(word.split(" ")[1])
        for word in (plot.locator("path.line0").last.get_attribute("d") or "M")[1:].split("L")
    ]
    raw_heights = [float(word.split(" ")[1]) for word in (raw or "M")[1:].split("L")]
    assert max(heights[20:]) - min(heights[20:]) < 0.3 * (max(raw_heights) - min(raw_heights))
    shown.get_by_label("b", exact=True).uncheck()
    assert plot.locator(".line1").count() == 0
    assert plot.locator(".line0").count() == 2


def test_completions_are_found_by_their_words(shown: Any, tmp_path: Path) -> None:
    opened(shown, folders_of_two_runs(tmp_path), tmp_path / "page.html")
    articles = shown.locator("#completions article:visible")
    assert articles.count() == 2
    shown.get_by_label("completions with").fill("Words OF a")
    assert articles.count() == 1
    shown.get_by_label("only cut off").check()
    assert articles.count() == 0
    assert shown.get_by_text("No completion is as wanted.").is_visible()


def test_a_curve_is_read_with_the_keyboard(shown: Any, tmp_path: Path) -> None:
    opened(shown, folders_of_two_runs(tmp_path), tmp_path / "page.html")
    shown.get_by_role("img", name="Curve of reward. Arrow keys show its values.").focus()
    shown.keyboard.press("ArrowLeft")
    tip = shown.locator('.chart[data-metric="reward"] [role="status"]')
    assert tip.inner_text().startswith("a, step 59: ")
    shown.keyboard.press("ArrowLeft")
    assert tip.inner_text().startswith("a, step 58: ")


def test_a_live_page_changes_and_what_the_reader_chose_stays(shown: Any, tmp_path: Path) -> None:
    folders = folders_of_two_runs(tmp_path)
    live = LivePage(folders)
    with serve(live, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown.goto(f"http://127.0.0.1:{server.server_port}{live.path}")
        shown.get_by_label("completions with").fill("words")
        chart = shown.get_by_role("img", name="Curve of reward. Arrow keys show its values.")
        chart.focus()
        write_metrics(folders[0], [{"step": i, "reward": 2.0, "loss": 1.0} for i in range(1, 71)])
        shown.locator('.chart[data-metric="reward"] text', has_text="70").wait_for(timeout=60_000)
        assert shown.locator("#completions article:visible").count() == 1
        assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Curve of reward.")
        server.shutdown()
