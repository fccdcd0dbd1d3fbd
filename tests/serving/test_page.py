"""The page in a real browser, against a stand-in of the protocol: what people see, do and hear for each kind of run."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from tests.helpers.page_server import MARKDOWN, MARKUP, Standin, standing_in
from unpad.data.sources.chat import read
from unpad.data.sources.files import SourceFile
from unpad.recipes.data import DataSettings
from unpad.serving import protocol
from unpad.serving.routes import content_security_policy, page

playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `dev`")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

Visit = Callable[..., Any]
PHONE = {"viewport": {"width": 390, "height": 780}}
CHINESE = {"locale": "zh-CN"}


# --------------------------------------------------------------------------- the file


def test_the_policy_has_the_hashes_of_the_scripts_and_styles_of_the_file():
    html = page()
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in content_security_policy(html)
        assert digest not in content_security_policy(html.replace(text, text + " "))
    directives = dict(part.split(" ", 1) for part in content_security_policy(html).split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["connect-src"] == "'self'"
    assert "unsafe" not in content_security_policy(html)


def test_nothing_of_the_file_is_from_elsewhere_or_makes_markup_of_text():
    html = page()
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", html)) <= {"http://www.w3.org"}  # names, not addresses
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html)
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", html), "the policy forbids them"
    assert max(map(len, html.split("\n"))) <= 120


def test_every_word_is_used_and_has_two_languages():
    html = page()
    block = html.split("const WORDS = {\n")[1].split("\n};")[0]
    rest = html.replace(block, "")
    names = re.findall(r"^  (\w+):", block, re.MULTILINE)
    assert len(names) > 80
    used = set(re.findall(r'\bt\.(\w+)|data-[tlp]="(\w+)"', rest))
    assert {one or other for one, other in used} == set(names)
    pairs = re.findall(r"^ +(\w+): \[(.*)\],$", block, re.MULTILINE)
    assert {name for name, words in pairs if not re.search("[一-鿿]", words)} <= {"top_p", "top_k", "branch"}


# --------------------------------------------------------------------------- the browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs a chromium of the system")
    with playwright_api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """Open the page of a stand-in. At the end: no error on any page, and no request to another host."""
    contexts, faults = [], list[str]()

    def opened(server: Standin, *, before: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 860}, "locale": "en-US", **options})
        context.set_default_timeout(20_000)
        contexts.append(context)
        shown = context.new_page()
        shown.add_init_script(before)
        shown.on("pageerror", lambda error: faults.append(str(error)))
        shown.on("console", lambda line: faults.append(line.text) if is_fault(line) else None)
        shown.on("request", lambda asked: None if is_own(asked.url, server) else faults.append(asked.url))
        shown.goto(server.address)
        shown.locator("#main > *, dialog[open]").first.wait_for()
        return shown

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def is_fault(line: Any) -> bool:
    """True for errors in the console, but not for the browser's notes on answers that are errors."""
    return line.type in ("error", "warning") and not line.text.startswith("Failed to load resource")


def is_own(url: str, server: Standin) -> bool:
    return url.startswith((server.address, f"blob:{server.address}", "data:"))


@pytest.fixture
def chat() -> Iterator[Standin]:
    with standing_in("chat") as server:
        yield server


@pytest.fixture
def shown(chat: Standin, visit: Visit) -> Any:
    """The page of the stand-in of a chat."""
    return visit(chat)


def ready(shown: Any) -> None:
    shown.locator("main:not([aria-busy=true])").wait_for()


def send(shown: Any, text: str, key: str = "Enter") -> None:
    """Type a message, or a text, and press the key that sends it."""
    shown.locator("#text").fill(text)
    shown.locator("#text").press(key)


def ask(shown: Any, text: str) -> None:
    """Type a message and press Enter; wait for the reply."""
    send(shown, text)
    ready(shown)


def begin(shown: Any, text: str, reply: str) -> None:
    """Type a message and press Enter; wait for the beginning of the reply."""
    send(shown, text)
    shown.get_by_text(reply).wait_for()


def said(shown: Any) -> list[str]:
    return list(shown.locator(".said").all_inner_texts())


def tap(shown: Any, name: str, place: int = -1) -> None:
    """Press the last button of a name, or another."""
    shown.get_by_role("button", name=name, exact=True).nth(place).click()


def remark(shown: Any, text: str) -> None:
    """Wait for a remark that goes by itself."""
    shown.locator("#remark", has_text=text).wait_for()


def reply_to(text: str, seed: int = 7) -> str:
    return f"You said: {text}. Seed {seed}."


def stored(shown: Any) -> int:
    """Conversations that the browser keeps."""
    return int(shown.evaluate("shelf.all(run.id).then(found => found.length)"))


# --------------------------------------------------------------------------- conversation


def test_a_conversation_is_sent_whole_and_its_replies_are_shown_with_their_speed(chat, shown):
    assert shown.title() == "demo · unpad"
    ask(shown, "Hello")
    ask(shown, "And now?")
    assert said(shown) == ["Hello", reply_to("Hello"), "And now?", reply_to("And now?", 8)]
    assert re.fullmatch(r"5 tokens · [\d,.]+ tokens/s · ended by itself", shown.locator(".stats").first.inner_text())
    body = chat.bodies("/v1/chat/completions")[-1]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == reply_to("Hello")
    assert (body["model"], body["stream"], body["seed"], body["history"]) == ("demo", True, 8, "trim")
    assert "temperature" not in body, "the run's own settings are the server's to know"
    assert shown.evaluate("document.activeElement.id") == "text"


def test_a_reply_is_announced_once_when_it_is_complete(chat, shown):
    shown.evaluate("""() => {
        window.heard = [];
        const live = [...document.querySelectorAll("[role=status], [role=alert], [aria-live]")];
        for (const one of live) new MutationObserver(() => heard.push(one.textContent))
            .observe(one, {childList: true, subtree: true, characterData: true});
    }""")
    begin(shown, "slow", "one two")
    assert shown.evaluate("heard") == []
    assert shown.locator("main").get_attribute("aria-busy") == "true"
    chat.go_on.set()
    ready(shown)
    assert shown.evaluate("heard") == ["Reply complete: one two three four"]
    ask(shown, "slow")
    assert len(shown.evaluate("heard")) == 2, "an equal reply is announced too"


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_a_reply_is_stopped_and_stays_as_far_as_it_came(way, chat, shown):
    begin(shown, "slow", "one two")
    if way == "button":
        tap(shown, "Stop")
    else:
        tap(shown, "Settings")
        shown.keyboard.press("Escape")
        assert shown.locator("main").get_attribute("aria-busy") == "true", "this Escape was for the dialog"
        shown.keyboard.press("Escape")
    ready(shown)
    assert chat.left.wait(5), "the server has to see that the client is gone"
    assert said(shown) == ["slow", "one two"]
    assert shown.locator(".tools", has_text="Stopped").count() == 1
    ask(shown, "Go on")
    assert chat.bodies("/v1/chat/completions")[-1]["messages"][1] == {"role": "assistant", "content": "one two"}


def test_retries_and_edits_keep_what_was_there_as_branches(chat, shown):
    ask(shown, "First")
    ask(shown, "Second")
    tap(shown, "Another reply", 0)
    ready(shown)
    assert said(shown) == ["First", reply_to("First", 9)]
    tap(shown, "Previous version")
    assert said(shown) == ["First", reply_to("First"), "Second", reply_to("Second", 8)]
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')") == "Previous version"
    shown.locator(".turn").first.hover()
    tap(shown, "Edit", 0)
    assert shown.get_by_label("Edited message").input_value() == "First"
    shown.get_by_label("Edited message").fill("Third")
    shown.keyboard.press("Enter")
    ready(shown)
    assert said(shown) == ["Third", reply_to("Third", 10)]
    assert len(chat.bodies("/v1/chat/completions")[-1]["messages"]) == 1
    tap(shown, "Next version")
    assert said(shown)[2:] == ["Second", reply_to("Second", 8)]
    tap(shown, "Edit", 0)
    shown.keyboard.press("Escape")
    assert len(said(shown)) == 4, "Escape leaves a message as it was"


def test_conversations_outlive_a_reload_and_are_deleted_on_request(shown):
    ask(shown, "First")
    tap(shown, "Another reply")
    ready(shown)
    tap(shown, "New conversation")
    ask(shown, "中文")
    shown.reload()
    shown.locator(".talk").wait_for()
    assert said(shown)[0] == "中文"
    tap(shown, "First")
    assert said(shown) == ["First", reply_to("First", 8)]
    assert "2 of 2" in shown.locator(".turn").last.inner_text()
    shown.locator("#list li", has_text="First").hover()
    tap(shown, "Delete: First")
    remark(shown, "Deleted")
    assert (stored(shown), said(shown)) == (1, [])
    tap(shown, "Undo")
    shown.locator(".talk").wait_for()
    assert (stored(shown), said(shown)) == (2, ["First", reply_to("First", 8)])
    tap(shown, "Delete all")
    remark(shown, "2 deleted")
    shown.reload()
    shown.locator(".welcome").wait_for()
    assert stored(shown) == 0
    assert shown.locator("#list li").count() == 0


def test_a_saved_conversation_is_a_line_that_training_reads(chat, shown, tmp_path):
    tap(shown, "Settings")
    shown.get_by_label("System text").fill("You are brief.")
    tap(shown, "Apply")
    ask(shown, "中文")
    ask(shown, "refuse")  # an exchange without a reply leaves no trace
    ask(shown, "markup")
    with shown.expect_download() as download:
        tap(shown, "Save as a JSON line")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert re.fullmatch(r"demo-[\w-]+\.jsonl", file.name)
    (example,) = read(SourceFile(file, "jsonl", None, 1.0, 0), DataSettings())
    turns = [(turn.role, turn.content) for turn in example.turns]
    river = "中国最长的河流是长江。它全长约六千三百公里。"
    assert turns == [("system", "You are brief."), ("user", "中文"), ("assistant", river), ("user", "markup"),
                     ("assistant", MARKUP)]  # fmt: skip
    asked = chat.bodies("/v1/chat/completions")[-1]["messages"]
    assert [(message["role"], message["content"]) for message in asked] == turns[:-1]


def test_markup_of_a_model_and_of_people_is_text(shown):
    ask(shown, "markup")
    ask(shown, MARKUP)
    assert said(shown)[1:3] == [MARKUP, MARKUP]
    assert shown.locator("main :is(script, img, b), #list :is(script, img, b)").count() == 0
    assert shown.title() == "demo · unpad"


def test_a_reply_in_markdown_is_shown_as_its_elements_and_copied_as_its_text(chat, shown):
    ask(shown, "markdown")
    shown.locator(".marked").wait_for()
    assert shown.locator(".marked > ol[start='3'] > li > strong").inner_text() == "bold"
    assert shown.locator(".marked > pre").inner_text() == "x = [1]\n"
    assert shown.locator(".marked a").get_attribute("href") == "https://example.org/"
    assert shown.locator(".marked").inner_text().endswith("<b>[a](javascript:alert(1))"), "neither is markup"
    ask(shown, "And now?")
    assert chat.bodies("/v1/chat/completions")[-1]["messages"][1]["content"] == MARKDOWN
    shown.reload()
    shown.locator(".marked > pre").wait_for()


def test_a_reply_that_fails_says_why_and_can_be_asked_again(chat, shown):
    for text, came, message in (
        ("refuse", 0, "the message makes a prompt of 2,000 tokens, the model's context is 1,024"),
        ("cut", 1, "The connection broke off, so this is not all of the reply."),
        ("fail", 1, "scores are not finite"),
        ("empty", 0, "The reply is empty."),
    ):
        tap(shown, "New conversation")
        ask(shown, text)
        assert len(said(shown)) == 1 + came
        assert shown.locator(".note.bad").inner_text() == message
        assert shown.locator("#announcer").inner_text() == message
        tap(shown, "Another reply")
        ready(shown)
        assert shown.locator(".branches").count() == came, "a reply without a text is no branch"
    assert len(chat.bodies("/v1/chat/completions")) == 8


def test_what_is_doubtful_stands_beside_the_answer(shown):
    ask(shown, "markup")
    tap(shown, "Another reply")
    ready(shown)
    assert "with temperature 0" in shown.locator(".note").inner_text(), "which is why the reply is the same again"
    ask(shown, "????")
    assert shown.locator(".note").last.inner_text() == "3 characters are unknown to the model."
    ask(shown, "long")
    assert "The 2 oldest messages no longer fit" in shown.locator(".note").last.inner_text()
    assert shown.locator(".stats").last.inner_text().endswith("ended at the limit of tokens")


def test_without_a_server_conversations_stay_readable_and_go_on_when_it_is_back(chat, shown):
    ask(shown, "Hello")
    chat.stop()
    ask(shown, "Are you there?")
    shown.get_by_role("alert").get_by_text("The server does not answer").wait_for()
    assert said(shown) == ["Hello", reply_to("Hello"), "Are you there?"]
    chat.start()
    tap(shown, "Try again")
    shown.locator("#gone").wait_for(state="hidden")
    tap(shown, "Another reply")
    ready(shown)
    assert said(shown)[-1] == reply_to("Are you there?", 9)
    shown.route(re.compile("/v1/models|/health"), lambda route: route.abort())  # the page itself is in the cache
    shown.reload()
    shown.locator(".talk").wait_for()
    assert len(said(shown)) == 4
    shown.unroute_all()


SLOW_STORE = """
const openNow = IDBFactory.prototype.open;
IDBFactory.prototype.open = function (...about) {
  const asked = {};
  setTimeout(() => {
    const real = openNow.apply(this, about);
    const pass = event => () => { asked.result = real.result; asked[event](); };
    for (const event of ["onupgradeneeded", "onsuccess"]) real[event] = pass(event);
  }, 1000);
  return asked;
};
"""


def test_a_token_is_asked_for_and_kept_for_the_tab_alone(visit):
    with standing_in("chat", token="secret") as server:
        shown = visit(server)
        shown.get_by_label("Token", exact=True).fill("wrong")
        tap(shown, "Continue")
        shown.get_by_text("This token is not right.").wait_for()
        shown.get_by_label("Token", exact=True).fill("secret")
        shown.keyboard.press("Enter")
        shown.locator(".welcome").wait_for()
        ask(shown, "Hello")
        assert said(shown)[-1] == reply_to("Hello")
        shown.reload()
        shown.locator(".talk").wait_for()
        assert shown.evaluate("JSON.stringify(localStorage)").find("secret") < 0
        assert shown.evaluate("sessionStorage.getItem('unpad.token')") == "secret"


def test_settings_begin_with_the_runs_own_and_only_changes_are_sent(chat, shown):
    tap(shown, "Settings")
    assert shown.get_by_label("Most tokens").input_value() == "128"
    shown.get_by_label("Temperature").fill("0.7")
    shown.get_by_label("Seed").fill("2147483647")
    shown.get_by_label("Top k").fill("-1")
    tap(shown, "Apply")
    assert shown.locator("#settings-dialog").is_visible(), "a value that cannot be is refused"
    shown.get_by_label("Top k").fill("40")
    tap(shown, "Apply")
    ask(shown, "Hello")
    body = chat.bodies("/v1/chat/completions")[-1]
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.7, 40, 2147483647)
    assert "top_p" not in body
    assert shown.locator(".stats").inner_text().endswith("seed 2147483647 · ended by itself")
    ask(shown, "Again")
    assert chat.bodies("/v1/chat/completions")[-1]["seed"] == 0, "seeds have 31 bits"
    tap(shown, "Settings")
    tap(shown, "Reset to the run's own")
    tap(shown, "Apply")
    ask(shown, "Hello")
    assert "temperature" not in chat.bodies("/v1/chat/completions")[-1]


# --------------------------------------------------------------------------- keyboard, languages, sizes


def test_the_keyboard_alone_does_everything(chat, visit):
    shown = visit(chat, permissions=["clipboard-read", "clipboard-write"])
    press = shown.keyboard.press
    active = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"

    def go_to(name: str) -> None:
        for _ in range(40):
            press("Tab")
            if shown.evaluate(active) == name:
                # What has the focus is seen to have it: an outline, or the border of the box around it.
                outlined = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
                assert shown.evaluate(f"{outlined} || !!document.activeElement.closest('.box')")
                return
        raise AssertionError(f"{name} cannot be reached")

    go_to("text")
    shown.keyboard.type("one")
    press("Shift+Enter")
    shown.keyboard.type("two")
    press("Enter")
    ready(shown)
    assert said(shown)[0] == "one\ntwo"
    go_to("Copy")
    press("Enter")
    go_to("Edit")
    press("Enter")
    shown.keyboard.type("!")
    press("Enter")
    ready(shown)
    go_to("Another reply")
    press("Space")
    ready(shown)
    go_to("Previous version")
    press("Enter")
    assert said(shown) == ["one\ntwo", reply_to("one\ntwo")]
    go_to("Settings")
    press("Enter")
    press("Escape")
    assert shown.evaluate(active) == "Settings", "a closed dialog gives the focus back"
    go_to("Delete: one")
    press("Enter")
    remark(shown, "Deleted")
    assert shown.evaluate(active) == "New conversation"


def test_enter_does_not_send_while_an_input_method_composes(chat, shown):
    shown.locator("#text").focus()
    session = shown.context.new_cdp_session(shown)
    session.send("Input.imeSetComposition", {"text": "ni hao", "selectionStart": 6, "selectionEnd": 6})
    shown.keyboard.press("Enter")
    assert (said(shown), chat.bodies("/v1/chat/completions")) == ([], [])
    shown.evaluate("$('text').value = ''")
    session.send("Input.insertText", {"text": "你好"})
    shown.keyboard.press("Enter")
    ready(shown)
    assert said(shown)[0].endswith("你好")


def test_the_page_speaks_chinese_to_chinese_browsers_and_changes_on_request(chat, visit):
    shown = visit(chat, **CHINESE)
    ask(shown, "中文")
    assert shown.locator("html").get_attribute("lang") == "zh-CN"
    assert re.fullmatch(r"22 个词元 · 每秒 [\d,.]+ 个 · 自行结束", shown.locator(".stats").inner_text())
    assert shown.locator("#text").get_attribute("placeholder") == "输入消息"
    tap(shown, "English")
    assert shown.locator("#text").get_attribute("placeholder") == "Message"
    assert "22 tokens" in shown.locator(".stats").inner_text()
    shown.reload()
    shown.locator(".talk").wait_for()
    assert shown.locator("html").get_attribute("lang") == "en"


def test_every_error_of_the_server_has_words_in_chinese():
    folder = Path(protocol.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    codes = set(re.findall(r'code(?:: str)?\s?=\s?"(\w+)"', sources)) | {"no_probability", "loading"}
    assert len(codes) > 15
    pixels = folder.parent / "data" / "pixels"
    faults = "".join(path.read_text(encoding="utf-8") for path in pixels.glob("*.py"))
    codes |= set(re.findall(r'ImageError\(\s*"(E_\w+)"', faults)) | {"E_BLANK"}
    block = page().split("const REFUSED = {\n")[1].split("\n};")[0]
    assert codes <= set(re.findall(r'^  (\w+): "[^"]*[一-鿿]', block, re.MULTILINE))


CUT_OFF = """() => [...document.querySelectorAll("body *")].filter(one => {
    const box = one.getBoundingClientRect();
    const scrolls = one.closest(".scroll, textarea, .unseen, #list, [popover]:not(:popover-open)");
    return box.width && !scrolls && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map(one => one.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("kind", ["chat", "text", "images", "patients"])
def test_everything_fits_the_width(kind, visit, tmp_path):
    with standing_in(kind) as server:
        shown = visit(server, **CHINESE)
        if kind == "chat":
            ask(shown, "x" * 90)
        use(shown, kind, tmp_path)
        for width in (320, 390, 1400):
            shown.set_viewport_size({"width": width, "height": 700})
            if kind == "chat":
                shown.locator("#settings").click()
                assert shown.evaluate(CUT_OFF) == []
                shown.keyboard.press("Escape")
                if width < 900:
                    tap(shown, "对话列表")
                    shown.locator("#list button").first.wait_for()
            assert shown.evaluate(CUT_OFF) == []
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            shown.keyboard.press("Escape")


@pytest.mark.parametrize("kind", ["chat", "text", "vqa", "images", "patients"])
def test_axe_finds_no_violation_in_light_and_dark(kind, visit, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe, of the extra `dev`").Axe()
    with standing_in(kind) as server:
        shown = visit(server, bypass_csp=True, **({} if kind == "text" else {**PHONE, **CHINESE}))
        use(shown, kind, tmp_path)
        for scheme in ("light", "dark"):
            shown.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            found = axe.run(shown).response["violations"]
            assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found] == []
            if kind == "chat" and scheme == "light":
                shown.locator("#settings").click()
                shown.locator("#settings-dialog").wait_for()


def use(shown: Any, kind: str, folder: Path) -> None:
    """Use the page of a kind of run, so that all its parts are there."""
    if kind in ("chat", "vqa"):
        if kind == "vqa":
            choose(shown, "#attach", [picture(folder)])
        for text in ("long", "refuse"):
            ask(shown, text)
        shown.locator("button:has(use[href='#i-retry'])").first.click()
        ready(shown)
    elif kind == "text":
        shown.locator("#text").fill("Once")
        shown.locator("#go").click()
        ready(shown)
    elif kind == "images":
        choose(shown, "#choose", [picture(folder), noise(folder)])
        shown.locator(".note").first.wait_for()
    else:
        shown.locator("#table").fill(TABLE)
        shown.locator("#predict").click()
        shown.locator("tbody button").last.click()
        shown.locator("summary").click()


# --------------------------------------------------------------------------- other kinds of runs


def picture(folder: Path) -> Path:
    image = Image.new("RGB", (64, 48), "white")
    ImageDraw.Draw(image).ellipse((16, 8, 48, 40), fill="red")
    image.save(folder / "circle.png")
    return folder / "circle.png"


def noise(folder: Path) -> Path:
    Image.effect_noise((160, 90), 60).save(folder / "noise.png")
    return folder / "noise.png"


def choose(shown: Any, button: str, files: list[Path]) -> None:
    with shown.expect_file_chooser() as chooser:
        shown.locator(button).click()
    chooser.value.set_files(files)


GIVE = """([selector, event, name, data]) => {
    const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0)), given = new DataTransfer();
    given.items.add(new File([bytes], name, {type: "image/png"}));
    const options = {bubbles: true, cancelable: true};
    const made = event === "drop" ? new DragEvent("drop", {...options, dataTransfer: given})
        : new ClipboardEvent("paste", {...options, clipboardData: given});
    document.querySelector(selector).dispatchEvent(made);
}"""


def give(shown: Any, selector: str, event: str, file: Path) -> None:
    """Drop or paste a file."""
    shown.evaluate(GIVE, [selector, event, file.name, base64.b64encode(file.read_bytes()).decode()])


def test_a_text_is_continued_in_place(visit, tmp_path):
    with standing_in("text") as server:
        shown = visit(server)
        shown.locator("#text").fill("Once")
        tap(shown, "Continue")
        ready(shown)
        once = "Once" + reply_to("Once")
        assert shown.locator("#text").input_value() == once
        assert shown.locator("mark").inner_text() == reply_to("Once")
        tap(shown, "Continue differently")
        ready(shown)
        assert shown.locator("#text").input_value() == "Once" + reply_to("Once", 8)
        send(shown, "Tell\nslow", "Control+Enter")
        shown.get_by_text("slowone two").wait_for()
        shown.keyboard.press("Escape")
        ready(shown)
        assert server.left.wait(5)
        assert shown.locator("#text").input_value() == "Tell\nslowone two"
        tap(shown, "Undo")
        assert shown.locator("#text").input_value() == "Tell\nslow"
        assert [body["prompt"] for body in server.bodies("/v1/completions")] == ["Once", "Once", "Tell\nslow"]
        shown.reload()
        shown.locator("#list li.open").wait_for()
        assert shown.locator("#text").input_value() == "Tell\nslow"
        with shown.expect_download() as download:
            tap(shown, "Save as a JSON line")
        download.value.save_as(tmp_path / "text.jsonl")
        assert json.loads((tmp_path / "text.jsonl").read_text()) == {"text": "Tell\nslow"}


def test_questions_are_about_an_image_over_which_the_kept_patches_are_drawn(visit, tmp_path):
    with standing_in("vqa") as server:
        shown = visit(server)
        send(shown, "What?")
        remark(shown, "Choose an image first.")
        file = picture(tmp_path)
        give(shown, "main", "drop", file)
        ask(shown, "Which shape?")
        ask(shown, "Which colour?")
        first, second = server.bodies("/v1/chat/completions")
        url = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
        about = {"type": "image_url", "image_url": {"url": url}}
        assert first["messages"] == [{"role": "user", "content": [about, {"type": "text", "text": "Which shape?"}]}]
        assert second["messages"][0]["content"][1]["text"] == "Which colour?"
        assert first["kept_patches"] is True
        veil = shown.locator(".picture path").first
        assert veil.get_attribute("d").count("M") == 9, "of 12 patches 3 entered the last block"
        slider = shown.get_by_role("slider").first
        assert shown.get_by_text("Patches that entered block 1: 3 of 12").count() == 2
        slider.press("ArrowLeft")
        assert veil.get_attribute("d") == ""
        assert shown.locator(".picture img").first.evaluate("one => one.naturalWidth") == 64
        shown.reload()
        shown.locator(".talk").wait_for()
        assert shown.locator(".picture img").last.evaluate("one => one.decode().then(() => one.naturalWidth)") == 64
        shown.locator("#chosen", has_text="circle.png").wait_for()
        give(shown, "body", "paste", noise(tmp_path))
        shown.locator("#chosen", has_text="noise.png").wait_for()
        with shown.expect_download() as download:
            tap(shown, "Save as a JSON line")
        download.value.save_as(tmp_path / "asked.jsonl")
        lines = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
        assert lines[1] == {"image": "circle.png", "question": "Which colour?", "answer": reply_to("Which colour?", 8)}


def test_images_get_a_bar_per_class_with_what_is_doubtful(visit, tmp_path):
    (tmp_path / "no.txt").write_text("no image")
    with standing_in("images") as server:
        shown = visit(server)
        choose(shown, "#choose", [picture(tmp_path), tmp_path / "no.txt"])
        shown.locator(".note.bad", has_text="E_FORMAT not an image").wait_for()
        first = shown.locator(".result").first
        assert first.locator(".bars li").all_inner_texts() == ["circle\n90.2%", "square\n8.6%", "star\n1.2%"]
        assert first.locator("li").first.evaluate("one => one.style.getPropertyValue('--share')") == "0.9021"
        assert "circle.png: circle, 90.2%" in shown.locator("#announcer").inner_text()
        assert shown.locator(".result").last.locator(".thumb svg").count() == 1, "no broken picture"
        give(shown, ".drop", "drop", noise(tmp_path))
        shown.get_by_text("no image of training was so large").wait_for()
        give(shown, "body", "paste", picture(tmp_path))
        shown.locator(".bars").nth(2).wait_for()
        assert server.bodies("/v1/classify?details=1")[0] == picture(tmp_path).read_bytes()


TABLE = '''id;time;code;value
p1;-20;pulse;71.50
p1;-10;"blood; ""gas""";
p02;-5;??;3

id;age;sex
p02;63;f
'''


def predict(shown: Any, table: str) -> None:
    shown.locator("#table").fill(table)
    tap(shown, "Predict")


def test_patients_of_a_table_get_a_risk_and_a_course(visit):
    with standing_in("patients") as server:
        shown = visit(server)
        predict(shown, "name,time\nx,1")
        shown.get_by_text('The table has no column "id". Its columns are: name, time').wait_for()
        predict(shown, "id,time\n,1")
        shown.get_by_text("Line 2 has no id.").wait_for()
        predict(shown, TABLE)
        shown.locator("tbody").wait_for()
        assert shown.locator("#fault").is_hidden()
        assert server.bodies("/v1/models/demo:predict") == [{"instances": [
            {"id": "p1", "events": [
                {"time": -20, "code": "pulse", "value": "71.50"}, {"time": -10, "code": 'blood; "gas"'}
            ]},
            {"id": "p02", "events": [{"time": -5, "code": "??", "value": "3"}, {"age": 63, "sex": "f"}]},
        ]}]  # fmt: skip
        rows = [row.split("\t") for row in shown.locator("tbody tr").all_inner_texts()]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["p1", "36.0%", "0.200", "2", "0", "0", ""], ["p02", "36.0%", "0.200", "2", "1", "0", "unknown codes"]
        ]  # fmt: skip
        tap(shown, "p02")
        shown.get_by_role("heading", name="Course of p02").wait_for()
        assert [one["id"] for one in server.bodies("/v1/models/demo:explain")[0]["instances"]] == ["p02"]
        assert shown.locator(".chart .dot").count() == 2
        shown.locator("summary").click()
        assert shown.locator("details tbody tr").last.inner_text().split("\t")[:2] == ["2", "facts"]
        assert shown.evaluate("document.activeElement.tagName") == "SUMMARY"
        tap(shown, "p02")
        shown.locator(".chart").wait_for(state="detached")
        predict(shown, "id,time,code\np3,-20,ward\np3,0,ward")
        shown.get_by_text("Probability of home").wait_for()
        heads = ["Patient", "Prediction", "Probability of home", "Probability of rehab", "Events"]
        assert shown.locator("thead th").all_inner_texts() == heads
        assert shown.locator("tbody td").all_inner_texts() == ["p3", "rehab", "25.0%", "75.0%", "2"]
        tap(shown, "p3")
        shown.get_by_role("heading", name="Course of p3 Probability of rehab").wait_for()
        shown.locator("summary").click()
        assert shown.locator("details tbody td").all_inner_texts()[2::4] == ["5.0%", "25.0%"], "of the likeliest class"
        predict(shown, "name,time\nx,1")
        shown.get_by_text('The table has no column "id".').wait_for()
        assert shown.locator("tbody").count() == 0, "no probability of another patient beside an error"
        kept = shown.evaluate("indexedDB.databases().then(found => found.length + JSON.stringify(localStorage))")
        assert kept.startswith("0"), "nothing of a patient is kept"
        assert "p02" not in kept
