"""The page in a real browser: `make browser` runs this with the Chromium of the system."""

from __future__ import annotations

import math
import operator
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefrl.scripts.report import LivePage, serve
from prefrl.scripts.report_page import page
from prefrl.types import Completion, Turn
from tests.unit.scripts.test_report import rollout, run_folder, write_batch, write_metrics
from tests.unit.scripts.test_report_tokens import REFERENCE, with_tokens, write_episode, write_record

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
        cut_off = [Turn([1, 2], Completion([5], "length", [-0.1], [True], [0]))]
        long = replace(rollout(1, "x", 1.0, prompt="2+2="), turns=cut_off)
        write_batch(run, 3, [rollout(0, f"Words of {run.name}", 0.5), long])
    return folders


def opened(tab: Any, folders: list[Path], file: Path) -> None:
    file.write_text(page(folders), encoding="utf-8")
    tab.goto(file.as_uri())


def heights_of(path: str | None) -> list[float]:
    """Of the points of an SVG path, from the top."""
    return [float(point.split(" ")[1]) for point in (path or "M")[1:].split("L")]


def smoothed(values: list[float], *, weight: float) -> tuple[list[float], list[float]]:
    """Mean and standard deviation up to each value, whose weight falls by a factor with each one after it."""
    means, deviations = [], []
    for end in range(1, len(values) + 1):
        weights = [weight ** (end - 1 - i) for i in range(end)]
        means.append(sum(map(operator.mul, weights, values)) / sum(weights))
        squares = [(value - means[-1]) ** 2 for value in values[:end]]
        deviations.append(math.sqrt(sum(map(operator.mul, weights, squares)) / sum(weights)))
    return means, deviations


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
    means, deviations = smoothed(heights_of(raw), weight=0.9)
    assert heights_of(plot.locator("path.line0").last.get_attribute("d")) == pytest.approx(means, abs=0.1)
    band = heights_of(plot.locator("path.band.fill0").get_attribute("d"))
    width = [low - high for high, low in zip(band[: len(means)], reversed(band[len(means) :]), strict=True)]
    assert width == pytest.approx([2 * deviation for deviation in deviations], abs=0.2)
    shown.get_by_label("b", exact=True).uncheck()
    assert plot.locator(".line1").count() == 0
    assert plot.locator(".line0").count() == 2


def test_completions_are_found_by_their_words(shown: Any, tmp_path: Path) -> None:
    opened(shown, folders_of_two_runs(tmp_path), tmp_path / "page.html")
    articles = shown.locator("#completions article:visible")
    assert articles.count() == 2
    shown.get_by_label("completions with").fill("words OF a")
    assert articles.count() == 1
    shown.get_by_label("only cut off").check()
    assert articles.count() == 0
    assert shown.get_by_text("No completion is as wanted.").is_visible()
    shown.get_by_label("completions with").fill("")
    assert "2+2=" in articles.inner_text()
    assert not shown.get_by_text("No completion is as wanted.").is_visible()


def test_a_curve_is_read_with_the_keyboard_and_the_pointer(shown: Any, tmp_path: Path) -> None:
    opened(shown, folders_of_two_runs(tmp_path), tmp_path / "page.html")
    shown.get_by_role("img", name="Curve of reward. Arrow keys show its values.").focus()
    shown.keyboard.press("ArrowLeft")
    tip = shown.locator('.chart[data-metric="reward"] [role="status"]')
    assert tip.inner_text() == "a, step 59: 0.0769 | b, step 59: 1.08"
    shown.keyboard.press("ArrowLeft")
    assert tip.inner_text() == "a, step 58: 0.923 | b, step 58: 1.92"
    for _ in range(2):  # there is none after the last
        shown.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("a, step 59: ")
    shown.locator('.chart[data-metric="reward"] svg').hover()  # its middle: 134 / 308 of 58 steps
    assert tip.inner_text().startswith("a, step 26: ")
    shown.mouse.move(0, 0)
    assert not tip.is_visible()


def test_a_live_page_changes_and_what_the_reader_chose_stays(shown: Any, tmp_path: Path) -> None:
    folders = folders_of_two_runs(tmp_path)
    live = LivePage(folders)
    with serve(live, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown.goto(f"http://127.0.0.1:{server.server_port}{live.path}")
        shown.get_by_label("completions with").fill("words")
        chart = shown.get_by_role("img", name="Curve of reward. Arrow keys show its values.")
        chart.focus()
        with shown.expect_response(lambda answer: answer.status == 304, timeout=60_000):
            pass  # the first answer is the whole page
        shown.evaluate("document.querySelector('main').id = 'same'")
        with shown.expect_response(lambda answer: answer.url.startswith("http"), timeout=60_000):
            pass
        assert shown.locator("main").get_attribute("id") == "same", "nothing is new"
        write_metrics(folders[0], [{"step": i, "reward": 2.0, "loss": 1.0} for i in range(1, 71)])
        shown.locator('.chart[data-metric="reward"] text', has_text="70").wait_for(timeout=60_000)
        assert shown.locator("#completions article:visible").count() == 1
        assert shown.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Curve of reward.")
        shown.goto("about:blank")  # it would miss the server
        server.shutdown()


def test_a_live_page_says_that_its_server_is_gone_and_goes_on_when_it_is_back(chromium: Any, tmp_path: Path) -> None:
    live = LivePage(folders_of_two_runs(tmp_path))
    tab, port = chromium.new_page(), 0
    for _ in range(2):
        with serve(live, port) as server:
            port = server.server_port
            threading.Thread(target=server.serve_forever, daemon=True).start()
            if tab.url == "about:blank":
                tab.goto(f"http://127.0.0.1:{port}{live.path}")
            tab.locator("#status", has_not_text="the server does not answer").wait_for(timeout=60_000)
            server.shutdown()
        tab.locator("#status", has_text="the server does not answer").wait_for(timeout=60_000)
    tab.close()


COLORS = ["logprob", "ratio", "advantage", "kl", "teacher_kl"]


def backgrounds(tab: Any) -> list[str]:
    """Of the tokens of the first completion."""
    spans = tab.locator(".tokens[tabindex]").first.locator("span")
    return spans.evaluate_all("spans => spans.map(span => getComputedStyle(span).backgroundColor)")


def test_tokens_have_the_colors_of_the_chosen_quantity_and_its_legend(shown: Any, tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {"ref_logprobs": REFERENCE})
    opened(shown, [folder], tmp_path / "page.html")
    shown.locator("#tokens-0-0-0 > summary").click()
    found = {}
    for color in COLORS:
        shown.get_by_label("colors of tokens").select_option(color)
        assert shown.locator(".of-color:visible").count() == 1
        legend = shown.locator(f'[data-of="{color}"]')
        assert legend.is_visible()
        keys = legend.locator(".key span")
        colors = keys.evaluate_all("all => all.map(key => getComputedStyle(key).backgroundColor)")
        assert len({*colors}) == len(colors)
        words = {"rgba(0, 0, 0, 0)": "none"} | dict(zip(colors, keys.all_inner_texts(), strict=True))
        found[color] = [words[background] for background in backgrounds(shown)]
    assert found["logprob"] == ["-0.5 and above", "-4 to -2", "below -4"]  # -0.25, -3, -9
    assert found["ratio"] == ["0.99 to 1.01", "2 and above", "below 0.5"]  # 1, e, 1 / e
    assert found["advantage"] == ["0.5 to 1", "-1 to -0.5", "1.5 and above"]  # 0.5, -1, 2
    assert found["kl"] == ["below 0.001", "0.1 to 1", "0.1 to 1"]  # 0, e - 2, 1 / e
    assert found["teacher_kl"] == ["none"] * 3
    assert shown.get_by_text("None is shown: teacher_kl_coef is 0: no teacher.").is_visible()


def test_values_of_tokens_are_read_with_the_keyboard_and_in_a_table(shown: Any, tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {})
    opened(shown, [folder], tmp_path / "page.html")
    shown.locator("#tokens-0-0-0 > summary").focus()
    shown.keyboard.press("Enter")
    shown.keyboard.press("Tab")
    status = shown.locator("#tokens-0-0-0 [role=status]")
    for move, expected in (
        ("Right", 'token 1 of 3, "a": '),
        ("Right", 'token 2 of 3, "<": '),
        ("Left", "token 1 of 3"),
    ):
        shown.keyboard.press(f"Arrow{move}")
        assert status.inner_text().startswith(expected)
    assert status.inner_text().endswith("log-prob -0.25, ratio 1, advantage 0.5")
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    rows = shown.locator("#table-0-0-0 tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(c => c.textContent))"
    )
    assert rows[0] == ["number", "token", "log-prob", "ratio", "advantage"]
    assert rows[2:] == [["2", '"<"', "-3", "2.718", "-1"], ["3", '"b"', "-9", "0.3679", "2"]]


def test_turns_of_an_episode_are_listed(shown: Any, tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    write_episode(folder)
    opened(shown, [folder], tmp_path / "page.html")
    shown.locator("#turns-0-0-0 > summary").click()
    turns = shown.locator("#turns-0-0-0 > ol > li")
    assert turns.count() == 2
    assert "and?" in turns.first.inner_text()
    turns.last.locator("summary").first.click()
    assert turns.last.locator(".tokens span").inner_text() == "b"


def test_the_token_that_was_reached_stays_while_a_live_page_changes(shown: Any, tmp_path: Path) -> None:
    folder = with_tokens(tmp_path / "run")
    live = LivePage([folder])
    with serve(live, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown.goto(f"http://127.0.0.1:{server.server_port}{live.path}")
        shown.get_by_label("colors of tokens").select_option("ratio")
        assert "None is shown: not recorded." in shown.locator('[data-of="ratio"]').inner_text()
        shown.locator("#tokens-0-0-0 > summary").click()
        shown.locator("#tokens-0-0-0 .tokens").focus()
        shown.keyboard.press("ArrowRight")
        shown.keyboard.press("ArrowRight")
        write_record(folder, 2, {})
        shown.locator("#tokens-0-0-0 [role=status]", has_text="ratio 2.718").wait_for(timeout=60_000)
        shown.keyboard.press("ArrowRight")
        assert shown.locator("#tokens-0-0-0 [role=status]").inner_text().startswith('token 3 of 3, "b"')
        assert shown.evaluate("document.body.dataset.color") == "ratio"
        shown.goto("about:blank")  # it would miss the server
        server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(chromium: Any, tmp_path: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    folder = with_tokens(tmp_path / "run")
    write_record(folder, 2, {"ref_logprobs": REFERENCE})
    # The policy of the page lets nothing else in, and so not axe.
    tab = chromium.new_context(color_scheme=scheme, bypass_csp=True).new_page()
    for folders in ([folder], folders_of_two_runs(tmp_path / "two")):
        opened(tab, folders, tmp_path / "page.html")
        tab.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        chosen = tab.get_by_label("colors of tokens")
        assert chosen.is_visible() == (folders == [folder])  # the other page has no tokens
        for color in COLORS if chosen.is_visible() else [None]:
            if color is not None:
                chosen.select_option(color)
            found = Axe().run(tab)
            assert found.violations_count == 0, found.generate_report()
    tab.context.close()
