"""The page in a headless browser, against a real server, scheduler and pool; only the model is a slow one by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from jaxserve.engine import EngineCore
from jaxserve.server.api_keys import make_api_keys
from jaxserve.server.app import ServerOptions
from jaxserve.server.live_feed import LiveFeed
from jaxserve.server.page_files import Page as PageFiles
from jaxserve.tokenizer import Tokenizer
from tests.server.browser import chromium
from tests.server.hand_engine import hand_engine
from tests.server.running_server import RunningServer

TEXT = "Rain is water that falls from clouds. Small drops meet, grow, and become too heavy for the air to carry. "
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>&lt;b&gt;"
DARK = "rgb(20, 23, 26)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def core(tokenizer: Tokenizer) -> EngineCore:
    return hand_engine(tokenizer, num_blocks=96, step_seconds=0.02)


@pytest.fixture(scope="module")
def feed() -> LiveFeed:
    return LiveFeed()


@pytest.fixture(scope="module")
def server(core: EngineCore, feed: LiveFeed) -> Iterator[RunningServer]:
    with RunningServer(core, extensions=[feed, PageFiles()]) as running:
        yield running


@pytest.fixture
def say(core: EngineCore, tokenizer: Tokenizer) -> Iterator[Callable[[str], None]]:
    def set_text(text: str) -> None:
        core._runner.says = tokenizer.encode(text)

    set_text(TEXT)
    yield set_text
    core._runner.says = None


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages, and at the end finds fault with what they did behind the scenes."""
    contexts, faults = [], []

    def open_it(server: RunningServer, *, allowed: str = "(?!)", **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning")
                and not re.search(allowed + "|willReadFrequently", message.text)  # tests read pixels
                and faults.append(message.text)
            ),
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        host = urlsplit(server.base_url).netloc
        page.on(
            "request",
            lambda request: urlsplit(request.url).netloc == host or faults.append(f"asked for {request.url}"),
        )
        page.goto(server.base_url + "/")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def page(open_page: OpenPage, server: RunningServer, say: Callable[[str], None]) -> Page:
    opened = open_page(server)
    expect(opened.locator("#link")).to_have_text("live")
    return opened


def send(page: Page, text: str = "What is rain?") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page: Page) -> str:
    return page.locator(".turn[data-role=assistant] .words").last.text_content() or ""


def expect_end(page: Page) -> None:
    expect(page.locator(".turn[data-role=assistant]").last).to_have_attribute("aria-busy", "false")


def test_an_answer_comes_bit_by_bit_and_whole(page: Page, core: EngineCore) -> None:
    send(page)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    lengths = []
    while page.locator(".turn[data-role=assistant]").get_attribute("aria-busy") == "true":
        lengths.append(len(answer(page)))
        page.wait_for_timeout(30)
    assert len({length for length in lengths if 0 < length < len(TEXT)}) >= 4, lengths
    assert lengths == sorted(lengths)
    assert answer(page) == TEXT
    assert page.locator(".turn[data-role=user] .words").text_content() == "What is rain?"
    expect(page.locator(".turn .meta")).to_contain_text(re.compile(r"\d+ tokens · first after [\d.]+ s"))
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    assert page.locator("#spoken").text_content() == TEXT
    send(page, "And snow?")
    expect_end(page)
    expect(page.locator(".turn")).to_have_count(4)


@pytest.mark.parametrize("how", ["key", "button"])
def test_an_answer_can_be_stopped(page: Page, core: EngineCore, say: Callable[[str], None], how: str) -> None:
    say(TEXT * 8)
    send(page)
    expect(page.locator(".turn[data-role=assistant] .words")).to_have_text(re.compile(".{20}"))
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    expect_end(page)
    expect(page.locator(".turn .meta")).to_have_text("stopped")
    expect(page.locator("#spoken")).to_have_text("Stopped")
    assert 20 <= len(answer(page)) < len(TEXT) * 8
    expect(page.locator("#queue td").first).to_have_text("0")  # the engine has let go of it
    assert core.stats.num_running == 0
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_probabilities_show_under_the_pointer_and_by_arrow_keys(page: Page) -> None:
    send(page)
    expect_end(page)
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    page.locator(".token", has_text="water").hover()
    expect(tip).to_be_visible()
    expect(tip.locator("li")).to_have_count(5)
    expect(tip.locator(".chosen .text")).to_have_text("␣water")
    assert tip.locator(".share").all_text_contents() == ["60 %", "20 %", "8.0 %", "4.0 %", "2.0 %"]
    page.locator(".token").first.focus()
    expect(tip.locator(".chosen .text")).to_have_text("Rain")
    page.keyboard.press("ArrowRight")
    expect(tip.locator(".chosen .text")).to_have_text("␣is")
    expect(page.locator(".token:focus")).to_have_attribute("aria-describedby", "tip")
    assert page.locator(".token[tabindex='0']").count() == 1, "an answer is one stop of the Tab key"


def test_characters_of_several_tokens_are_whole(page: Page, say: Callable[[str], None]) -> None:
    text = "naïve 🫠🥹🦩 龜 end"
    say(text)
    send(page)
    expect_end(page)
    assert answer(page) == text
    assert "".join(page.locator(".token").all_text_contents()) == text
    page.locator(".token", has_text="🦩").hover()
    assert page.get_by_role("tooltip").locator("ol").count() > 1, "the alternatives of each of its tokens"


def test_text_of_users_and_models_is_never_markup(page: Page, say: Callable[[str], None]) -> None:
    say(HOSTILE)
    send(page, HOSTILE)
    expect_end(page)
    assert answer(page) == HOSTILE
    assert page.locator(".turn[data-role=user] .words").text_content() == HOSTILE
    page.locator(".token").first.hover()
    assert page.locator("#log img, #log script, #log b, #tip img, #tip script").count() == 0
    assert page.title() == "jaxserve"


def test_code_and_hosts_from_elsewhere_are_blocked(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server, allowed="Content Security Policy")
    blocked = page.evaluate(
        """async () => {
          const seen = [];
          document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "document.title = 'broken'";
          document.body.append(script);
          await fetch("http://127.0.0.1:9/").catch(() => {});
          await new Promise((resolve) => setTimeout(resolve, 50));
          return seen;
        }"""
    )
    assert {"script-src-elem", "connect-src"} <= set(blocked)
    assert page.title() == "jaxserve"


PIXELS = """(id) => {
  const canvas = document.getElementById(id);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return Array.from(data).reduce((hash, value) => (hash * 31 + value) % 1000003, 7);
}"""


def test_the_engine_is_seen_at_work(page: Page, core: EngineCore, say: Callable[[str], None]) -> None:
    before = {name: page.evaluate(PIXELS, name) for name in ("map", "history")}
    say(TEXT * 3)
    send(page, "What is rain? " * 8)
    expect(page.locator("#n-used")).not_to_have_text("0")
    expect(page.locator("#strip [data-kind=decode]")).to_have_count(1)
    expect(page.locator("#queue tr").first.locator("td").first).to_have_text("1")
    expect(page.locator("#map")).to_have_attribute("aria-label", re.compile(r"96 KV blocks: \d+ used"))
    assert all(page.evaluate(PIXELS, name) != pixels for name, pixels in before.items())
    strip = page.locator("#strip").get_attribute("aria-label") or ""
    assert re.fullmatch(r"step \d+: \d+ tokens, of which .*\d+ decode.*", strip)
    shares = page.evaluate("[...document.querySelectorAll('#strip i')].map((i) => parseFloat(i.style.width))")
    assert sum(shares) == pytest.approx(100)
    expect(page.locator("#output-rate")).not_to_have_text("–")
    page.keyboard.press("Escape")
    expect(page.locator("#n-used")).to_have_text("0")
    expect(page.locator("#n-cached")).not_to_have_text("0")
    expect(page.locator("#itl-p50")).not_to_have_text("–")
    assert float(page.locator("#itl-p50").text_content() or "") >= 20, "milliseconds; a step takes 20"
    total = sum(
        int(page.locator(f"#n-{kind}").text_content() or "") for kind in ("used", "shared", "cached", "free")
    )
    assert total == core.stats.num_blocks == 96


def test_nobody_watches_for_a_page_that_is_closed(page: Page, feed: LiveFeed) -> None:
    assert feed.num_watchers >= 1
    page.close()
    for _ in range(200):
        if feed.num_watchers == 0:
            return
        page.context.pages or page.context.new_page()
        page.context.pages[0].wait_for_timeout(20)
    raise AssertionError("somebody watches")


def test_settings_are_sent_and_empty_ones_are_not(page: Page) -> None:
    bodies = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    send(page)
    expect_end(page)
    page.get_by_text("Settings").click()
    for name, value in {
        "System prompt": "Be brief.",
        "Temperature": "0.3",
        "Top p": "0.9",
        "Top k": "40",
        "Min p": "0.05",
        "Repetition penalty": "1.1",
        "Max tokens": "5",
        "Seed": "7",
        "Stop at": "###",
    }.items():
        page.get_by_label(name).fill(value)
    page.get_by_label("Probabilities of tokens").uncheck()
    send(page, "And snow?")
    expect_end(page)
    expect(page.locator(".turn .meta").last).to_contain_text("5 tokens")
    expect(page.locator(".turn .meta").last).to_contain_text("cut at the limit")
    assert page.locator(".turn").last.locator(".token").count() == 0
    first, second = bodies
    common = {"model": "hand", "stream": True, "stream_options": {"include_usage": True}}
    assert first == {
        **common,
        "messages": [{"role": "user", "content": "What is rain?"}],
        "logprobs": True,
        "top_logprobs": 5,
    }
    assert second == {
        **common,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is rain?"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "And snow?"},
        ],
        **{"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
        **{"max_completion_tokens": 5, "seed": 7, "stop": ["###"]},
    }


def test_what_goes_wrong_is_said(
    open_page: OpenPage, server: RunningServer, core: EngineCore, say: Callable[[str], None]
) -> None:
    page = open_page(server, allowed="status of 400")
    expect(page.locator("#link")).to_have_text("live")
    alert = page.locator("#alert")
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("7")
    send(page)
    expect(alert).to_contain_text("Temperature")
    expect(page.get_by_label("Temperature")).to_be_focused()
    page.get_by_label("Temperature").fill("")
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_role("button", name="Ask again").click()
    expect(alert).to_contain_text("100000")  # the server's own words
    page.get_by_label("Max tokens").fill("")
    original = core._runner.read

    def fail(step: object) -> object:
        result = original(step)
        for request_id in list(result.sampled_token_ids):
            if core.stats.generation_tokens > ended + 5:
                del result.sampled_token_ids[request_id]
                result.failed[request_id] = "logits are not finite"
        return result

    ended = core.stats.generation_tokens
    core._runner.read = fail
    try:
        page.get_by_role("button", name="Ask again").click()
        expect(page.locator(".turn .meta.error")).to_contain_text("not finite")
    finally:
        core._runner.read = original
    assert 0 < len(answer(page)) < len(TEXT)
    page.get_by_role("button", name="Ask again").click()  # in the place of the broken answer
    expect_end(page)
    expect(page.locator(".turn")).to_have_count(2)
    assert answer(page) == TEXT
    expect(alert).to_be_empty()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_a_stream_that_breaks_off_is_no_whole_answer(page: Page) -> None:
    """Without `[DONE]` nothing is waited for any more, and what came stands there as what it is."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "Rain is"}, "finish_reason": None}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\n"),
    )
    send(page)
    expect(page.locator(".turn .meta.error")).to_have_text("The connection broke off.")
    assert answer(page) == "Rain is"
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Ask again")).to_be_visible()


def test_a_connection_that_is_lost_is_told_in_our_words(page: Page) -> None:
    page.evaluate("""() => {
      const chunk = {choices: [{index: 0, delta: {content: "Rain is"}, finish_reason: null}]};
      const start = (controller) => {
        controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
        setTimeout(() => controller.error(new TypeError("network error")), 50);
      };
      window.fetch = async () => new Response(new ReadableStream({start}));
    }""")
    send(page)
    expect(page.locator(".turn .meta.error")).to_have_text("The connection broke off.")
    expect(page.locator("#alert")).to_have_text("The connection broke off.")
    assert answer(page) == "Rain is"


def test_a_refused_question_does_not_stay_in_the_conversation(
    open_page: OpenPage, server: RunningServer, say: Callable[[str], None]
) -> None:
    """One that is too long would have all that come after it refused as well."""
    page = open_page(server, allowed="status of 400")
    expect(page.locator("#link")).to_have_text("live")
    bodies = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    send(page, "word " * 5000)
    expect(page.locator("#alert")).to_contain_text("tokens")
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("7")
    send(page, "And hail?")
    expect(page.locator("#alert")).to_contain_text("Temperature")
    page.get_by_label("Temperature").fill("")
    send(page, "And snow?")
    expect_end(page)
    expect(page.locator(".turn")).to_have_count(2)
    assert answer(page) == TEXT
    assert [len(body["messages"]) for body in bodies] == [1, 1]
    assert bodies[-1]["messages"][0]["content"] == "And snow?"


def test_an_answer_stopped_before_its_first_word_makes_way_for_the_next(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: None)
    send(page)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn .meta").last).to_have_text("stopped")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Ask again").click()
    expect_end(page)
    expect(page.locator(".turn")).to_have_count(2)
    assert answer(page) == TEXT


def test_a_key_is_asked_for_and_kept_in_the_tab(
    open_page: OpenPage, tokenizer: Tokenizer, core: EngineCore
) -> None:
    options = ServerOptions(keys=make_api_keys([("alice", "the-key")]))
    engine = hand_engine(tokenizer)
    engine._runner.says = tokenizer.encode("Yes.")
    with RunningServer(engine, options, extensions=[LiveFeed(), PageFiles()]) as locked:
        page = open_page(locked, allowed="status of 401")
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        expect(page.get_by_label("Message", exact=True)).to_be_hidden()
        expect(page.locator("#link")).to_have_text("needs a key")
        page.keyboard.type("a-wrong-one")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The server does not know this key.")
        field.fill("the-key")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        expect(page.locator("#link")).to_have_text("live")
        send(page)
        expect_end(page)
        assert answer(page) == "Yes."
        places = page.evaluate(
            "[Object.values(sessionStorage), localStorage.length, document.cookie, location.href, field()]"
            ".map(String)".replace("field()", "document.getElementById('key').value")
        )
        assert places == ["the-key", "0", "", locked.base_url + "/", ""]
        page.reload()
        expect(page.locator("#link")).to_have_text("live")
        page.evaluate("sessionStorage.clear()")
        send(page)
        expect(page.get_by_label("API key")).to_be_focused()
        expect(page.locator("#alert")).to_contain_text("key is required")
        page.keyboard.type("the-key")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        expect(page.locator("#alert")).to_be_empty()
        page.evaluate("sessionStorage.clear()")  # as when the server's keys have changed
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.get_by_label("API key")).to_be_focused()
        page.reload()
        expect(page.get_by_label("API key")).to_be_focused()


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d");
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.documentElement);
  const of = (name) => luminance(style.getPropertyValue(`--${name}`).trim());
  const pairs = [["ink", "ground"], ["ink", "surface"], ["ink", "sunk"], ["soft", "ground"], ["soft", "surface"],
    ["accent", "ground"], ["on-accent", "accent"], ["bad", "ground"]];
  return pairs.map(([one, other]) => {
    const [low, high] = [of(one), of(other)].sort((a, b) => a - b);
    return [`${one} on ${other}`, (high + 0.05) / (low + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_legible(open_page: OpenPage, server: RunningServer, scheme: str) -> None:
    page = open_page(server, color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == DARK) == (scheme == "dark")
    for pair, ratio in page.evaluate(CONTRAST):
        assert ratio >= 4.5, f"{pair}: {ratio:.2f}, {scheme}"


def test_the_keyboard_reaches_everything(page: Page) -> None:
    names = []
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    for _ in range(10):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Skip to the message":
            break
    expect(page.get_by_role("link", name="Skip to the message")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("What is rain?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Briefly.")
    assert page.locator(".turn").count() == 0
    page.keyboard.press("Enter")
    expect_end(page)
    assert page.locator(".turn[data-role=user] .words").text_content() == "What is rain?\nBriefly."
    for _ in range(12):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.className || 'none'"))
    assert {"again", "new-chat", "engine"} <= set(names), names
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Temperature")).to_be_visible()
    for element in page.locator("input, textarea, select, button").all():
        name = element.evaluate("(e) => e.ariaLabel || e.labels?.[0]?.textContent || e.textContent")
        assert name.strip(), "a control without a name"


def test_enter_that_ends_a_composition_sends_nothing(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("日本")
    page.evaluate(
        "document.getElementById('message').dispatchEvent(new KeyboardEvent('keydown', "
        "{key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))"
    )
    assert page.locator(".turn").count() == 0


def test_a_narrow_screen_shows_one_at_a_time(
    open_page: OpenPage, server: RunningServer, say: Callable[[str], None]
) -> None:
    page = open_page(server, viewport={"width": 320, "height": 640})
    send(page, "w" * 200)
    expect_end(page)
    engine = page.get_by_role("button", name="Engine")
    expect(page.locator("#engine")).to_be_hidden()
    engine.click()
    expect(engine).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#composer")).to_be_hidden()
    assert page.evaluate("document.getElementById('map').width") > 100
    for view in ("engine", "chat"):
        page.locator(f"[data-shows={view}]").click()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 320, f"{view} is {width} pixels wide"
