"""The dashboard in a real browser: what a reader sees, with mouse, keyboard, a narrow screen and a screen reader."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precedent_server.keys import add_key

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Start = Callable[..., str]

ANSWER = "Order 1042 was sent on Monday. It arrives on Thursday, between nine and noon."
LATER = "Order 1043 was sent on Tuesday. It arrives on Friday, between nine and noon."
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"

SCREENSHOTS = os.environ.get("PRECEDENT_SCREENSHOTS")
"""A folder for the pictures in the documentation."""


def answer(prompt: str) -> str:
    """What the script says to a prompt: hostile markup if it was asked for."""
    return HOSTILE if "markup" in prompt.rpartition("user\n")[2] else ANSWER


def ask(page: Any, message: str, how: str = "Speculated") -> None:
    page.get_by_label("Message").fill(message)
    page.get_by_label(how).check()
    page.get_by_role("button", name="Ask").click()
    page.locator("#answer-status", has_text="The answer is complete").wait_for()


def choose_all(page: Any) -> None:
    page.get_by_role("button", name="Search").click()
    for box in page.get_by_role("checkbox").all():
        box.check()


def test_both_answers_stand_side_by_side(start: Start, opened: Open) -> None:
    page = opened(start(answer))
    ask(page, "Where is order 1042?")  # now the cache holds the answer
    ask(page, "Where is order 1042?", "Both, side by side")
    shown = page.locator("#answers article")
    assert shown.locator("h3").all_inner_texts() == ["Speculated", "Plain"]
    assert shown.locator(".answer").all_inner_texts() == [ANSWER, ANSWER]
    speculated, plain = shown.all()
    assert speculated.locator(".token.source-recall").count() > 10
    assert plain.locator(".token.source-target").count() == plain.locator(".token").count() > 10
    assert re.search(r"^recall \d+: earlier completions", speculated.locator(".legend").inner_text(), re.MULTILINE)
    for clock in shown.locator("dd").all_inner_texts():
        assert re.match(r"[\d.,]+( s)?$", clock)
    first, second = (one.bounding_box() for one in (speculated, plain))
    assert first["y"] == second["y"]
    assert first["x"] < second["x"]
    for scheme in ("light", "dark"):
        take_picture(page, "#playground", f"dashboard-{scheme}", scheme)


def take_picture(page: Any, part: str, name: str, scheme: str = "light") -> None:
    if SCREENSHOTS:
        page.emulate_media(color_scheme=scheme)
        page.locator(part).screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def test_hostile_text_is_text(start: Start, opened: Open) -> None:
    page = opened(start(answer))
    ask(page, f"markup {HOSTILE}")
    page.get_by_role("button", name="Search").click()
    page.locator("#completions summary").first.click()
    assert page.locator("#answers .answer").inner_text() == HOSTILE
    assert HOSTILE in page.locator("#completions .answer").last.inner_text()
    assert page.locator("img, main script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_completions_are_searched_and_forgotten(start: Start, opened: Open) -> None:
    page = opened(start(answer))
    for message in ("apples", "pears"):
        ask(page, message)
    page.get_by_label("Text to look for").fill("PEARS")
    page.get_by_role("button", name="Search").click()
    page.get_by_text("Completions 1 to 1").wait_for()
    page.once("dialog", lambda dialog: dialog.dismiss())
    choose_all(page)
    page.get_by_role("button", name="Forget").click()
    assert page.locator("#completions li").count() == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Forget").click()
    page.get_by_text("1 forgotten. Nothing holds this text.").wait_for()
    page.get_by_label("Text to look for").fill("")
    page.get_by_role("button", name="Search").click()
    page.get_by_text("Completions 1 to 1").wait_for()


def test_a_key_is_asked_for_and_kept_nowhere(start: Start, opened: Open, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    user, admin = add_key(keys, "desk", "shop"), add_key(keys, "boss", "shop", "admin")
    page = opened(start(answer, keys=keys))

    def use(key: str) -> None:
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Use this key").click()

    page.get_by_label("API key").wait_for()
    use("pk-wrong")
    page.get_by_text("this server needs an API key").wait_for()
    use(user)
    ask(page, "Where is order 1042?")
    page.get_by_text("There are no figures: this key has the role 'use'").wait_for()
    use(admin)
    page.locator("#figures-models h3", has_text="scripted").wait_for()
    page.get_by_text("Completions 1 to 1").wait_for()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.search]") == [
        0, 0, "", "",
    ]  # fmt: skip
    assert page.get_by_label("API key").input_value() == ""
    page.reload()
    page.get_by_text("this server needs an API key").wait_for()


def test_a_step_under_the_microscope(start: Start, opened: Open) -> None:
    page = opened(start(lambda prompt: LATER if "1043" in prompt else ANSWER, kept_steps=32))
    for number in (1042, 1042, 1043):
        ask(page, f"Where is order {number}?")
    page.get_by_role("button", name="Show the last steps").click()
    page.get_by_text("candidates were accepted").wait_for()
    verdicts = page.locator("#step td:last-child")
    while set(verdicts.all_inner_texts()) != {"yes", "no"}:
        page.get_by_role("button", name="Earlier").click()  # to a step of which a part was accepted
    image = page.locator("#step img")
    assert image.evaluate("one => one.decode().then(() => one.naturalWidth)") > 100
    take_picture(page, "#steps", "microscope")


def test_everything_can_be_done_with_the_keyboard(start: Start, opened: Open) -> None:
    page = opened(start(answer))
    page.locator("#model option").wait_for(state="attached")

    def tab_to(name: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == name:
                break
        assert page.locator(f"#{name}:focus-visible").evaluate("one => getComputedStyle(one).outlineStyle") == "solid"

    tab_to("message")
    page.keyboard.type(" Please.")
    tab_to("run-speculated")
    page.keyboard.press("ArrowDown")
    assert page.get_by_label("Plain").is_checked()
    tab_to("send")
    page.keyboard.press("Enter")
    page.locator("#answer-status", has_text="The answer is complete. Plain").wait_for()
    tab_to("query")
    page.keyboard.press("Enter")
    page.locator("#completions li").wait_for()
    page.locator("#query").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.get_by_role("checkbox").is_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#completions details").get_attribute("open") is not None


@pytest.mark.parametrize("width", [320, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_overflows(start: Start, opened: Open, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    screen = {"width": width, "height": 800}
    page = opened(start(answer, kept_steps=8), viewport=screen, color_scheme=scheme, reduced_motion="reduce")
    ask(page, "Where is order 1042?")
    ask(page, "Where is order 1042? " + "x" * 200, "Both, side by side")
    page.get_by_role("button", name="Search").click()
    page.locator("#completions summary").first.click()
    page.locator("#figures-models table").get_by_text("recall").wait_for()
    page.get_by_role("button", name="Show the last steps").click()
    page.locator("#step img").wait_for()
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_checks_see_what_is_wrong(start: Start, opened: Open) -> None:
    """Markup that axe-core must object to, and an inline script that the policy must stop."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = opened(start(answer), quiet=False)
    page.evaluate("document.querySelector('label[for=message]').remove()")
    assert "label" in [one["id"] for one in axe.Axe().run(page).response["violations"]]
    refused = page.evaluate(
        """() => new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          document.body.append(script);
        })"""
    )
    assert (refused, page.evaluate("window.hacked")) == ("script-src-elem", None)
