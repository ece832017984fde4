"""Execution of one action in a session's tabs; clicks go to current coordinates, not selectors."""

from __future__ import annotations

from playwright.async_api import Error

from envs.webarena.actions import Action
from envs.webarena.observation import Element
from envs.webarena.tabs import Refusal, Tab, Tabs, reason

TYPED_BY_KEY = 200  # characters; a longer text is inserted at once
AT_A_TIME = 10  # keys sent in one request

_CHOOSE = """function() {
  const list = this.closest('select');
  if (!list || this.disabled || list.disabled) return false;
  if (list.multiple) { this.selected = !this.selected; } else { this.selected = true; }
  list.dispatchEvent(new Event('input', {bubbles: true}));
  list.dispatchEvent(new Event('change', {bubbles: true}));
  return true;
}"""
_SCROLL = """by => { const e = document.scrollingElement || document.body; if (e) e.scrollTop += \
by * window.innerHeight; }"""


async def act(tabs: Tabs, action: Action, element: Element | None) -> None:
    """Execute the action in the current tab or on the list of tabs; `stop` does nothing.

    element: the target of click, hover and type, else None.
    A page that cannot be opened becomes a note of `tabs`.
    Errors: Refusal, with the reason, if the action cannot be done; BrowserLost. Errors after the
    action closed its own tab are ignored.
    """
    tab = tabs.current
    try:
        match action.kind:
            case "click" | "hover" | "type":
                assert element is not None
                await _at(tabs, action, element)
            case "press":
                await tabs.input(tab.page.keyboard.press(action.text))
            case "scroll":
                await tabs.ask(tab.page.evaluate(_SCROLL, -1 if action.text == "up" else 1))
            case "goto":
                await tabs.goto(action.text)
            case "new_tab":
                await tabs.new_tab()
            case "tab_focus":
                await _focus(tabs, action.number)
            case "close_tab":
                await _close(tabs)
            case "go_back":
                await tabs.ask(tab.page.go_back(wait_until="commit"))
            case "go_forward":
                await tabs.ask(tab.page.go_forward(wait_until="commit"))
            case "stop":
                pass
    except Error as error:
        if not tab.page.is_closed():  # a click may close its own tab
            raise Refusal(f"{action} did not work: {reason(error)}") from error


async def _at(tabs: Tabs, action: Action, element: Element) -> None:
    tab = tabs.current
    if element.role == "option" and action.kind == "click" and await _choose(tabs, tab, element):
        return
    x, y = await _middle(tabs, tab, element)
    if action.kind == "hover":
        await tabs.input(tab.page.mouse.move(x, y))
        return
    await tabs.input(tab.page.mouse.click(x, y))
    if action.kind == "type":
        keyboard = tab.page.keyboard
        if len(action.text) <= TYPED_BY_KEY:
            for first in range(0, len(action.text), AT_A_TIME):
                await tabs.input(keyboard.type(action.text[first : first + AT_A_TIME]))
        else:
            await tabs.input(keyboard.insert_text(action.text))
        if action.enter:
            await tabs.input(keyboard.press("Enter"))


async def _choose(tabs: Tabs, tab: Tab, element: Element) -> bool:
    """Choose an option of a select box (toggle it in a multiple one): it has no place to click.
    Return False, with nothing done, if the option is disabled or in no select box.
    """
    node = await tabs.ask(tab.send("DOM.resolveNode", backendNodeId=element.backend_id))
    call = {"functionDeclaration": _CHOOSE, "returnByValue": True}
    answer = await tabs.ask(
        tab.send("Runtime.callFunctionOn", objectId=node["object"]["objectId"], **call)
    )
    return bool(answer["result"].get("value"))


async def _middle(tabs: Tabs, tab: Tab, element: Element) -> tuple[float, float]:
    """Scroll the element into view if necessary; return (x, y), the middle of its largest visible
    part, in CSS pixels of the window. Errors: Refusal if no part is visible.
    """
    try:
        await tabs.ask(tab.send("DOM.scrollIntoViewIfNeeded", backendNodeId=element.backend_id))
        answer = await tabs.ask(tab.send("DOM.getContentQuads", backendNodeId=element.backend_id))
    except Error as error:
        raise Refusal(f"{element} is not visible any more, so it cannot be reached") from error
    best, largest = None, 0.0
    for quad in answer["quads"]:
        left, right = max(0.0, min(quad[0::2])), min(float(tabs.limits.width), max(quad[0::2]))
        top, bottom = max(0.0, min(quad[1::2])), min(float(tabs.limits.height), max(quad[1::2]))
        area = max(0.0, right - left) * max(0.0, bottom - top)
        if area > largest:
            best, largest = ((left + right) / 2, (top + bottom) / 2), area
    if best is None:
        raise Refusal(f"{element} has no place in the page, so it cannot be reached")
    return best


async def _focus(tabs: Tabs, number: int) -> None:
    living = tabs.living()
    if not 0 <= number < len(living):
        raise Refusal(f"there is no tab {number}; the tabs are 0 to {len(living) - 1}")
    tabs.current = living[number]
    await tabs.ask(tabs.current.page.bring_to_front())


async def _close(tabs: Tabs) -> None:
    """Close the current tab. The last remaining tab becomes current, or a new blank one."""
    await tabs.ask(tabs.current.page.close())
    living = tabs.living()
    if living:
        tabs.current = living[-1]
        await tabs.ask(tabs.current.page.bring_to_front())
    else:
        await tabs.new_tab()
