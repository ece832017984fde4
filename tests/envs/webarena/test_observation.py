"""Observations of a real page, and actions on the elements they show."""

import re


def lines(observation):
    return observation.partition("\n\n")[2].partition("\nURL: ")[0].splitlines()


def test_a_page_is_shown_in_webarenas_form(episode):
    head, _, rest = episode.first.partition("\n\n")
    assert head == "OBSERVATION:\nTab 0 (current): Mug shop"
    assert (
        rest == "[1] RootWebArea 'Mug shop' focused: True\n"
        "\t[2] heading 'Mugs'\n"
        "\t[3] link 'Second page'\n"
        "\t[4] link 'New window'\n"
        "\t[5] form ''\n"
        "\t\t[6] StaticText 'Search '\n"
        "\t\t[7] textbox 'Search' required: False\n"
        "\t\t[8] combobox 'Size' hasPopup: menu expanded: False\n"
        "\t\t\t[9] option 'Small' selected: True\n"
        "\t\t\t[10] option 'Large' selected: False\n"
        "\t\t[11] button 'Go'\n"
        "\t[12] button 'Load'\n"
        "\t[13] Iframe 'Inner'\n"
        "\t\t[14] RootWebArea 'Inside'\n"
        "\t\t\t[15] button 'Inner button'\n"
        "URL: http://onestopmarket.com/\n"
        "OBJECTIVE: Find the price of the red mug.\n"
        "PREVIOUS ACTION: None"
    )


def test_only_what_the_window_shows_is_listed(episode):
    assert "Far below" not in episode.first
    assert "hidden words" not in episode.first
    for _ in range(3):
        below = episode.step("scroll [down]")
    assert "link 'Far below'" in below
    assert "heading 'Mugs'" not in below
    assert "heading 'Mugs'" in [episode.step("scroll [up]") for _ in range(3)][-1]


def test_ids_stay_while_the_document_lives_and_are_never_used_again(episode):
    def ids(observation):
        return {
            line.strip().partition("] ")[2]: int(re.match(r"\t*\[(\d+)\]", line)[1])
            for line in lines(observation)
        }

    first = ids(episode.first)
    loaded = ids(episode.click("button", "Load"))
    assert {name: loaded[name] for name in first if name in loaded} == {
        name: first[name] for name in first if name in loaded
    }
    assert loaded["StaticText 'arrived'"] > max(first.values())  # the step waited for this new text
    second = ids(episode.click("link", "Second page"))
    assert min(second.values()) > max(loaded.values())
    back = ids(episode.step("go_back"))
    assert min(back.values()) > max(second.values())
    assert (
        episode.step(f"click [{first[chr(108) + 'ink ' + repr('Second page')]}]")
        == "There is no element 3 in the current page."
    )


def test_equal_episodes_are_shown_equally(spec):
    def play():
        simulator = spec.make()
        try:
            return [
                simulator.reset(0),
                *(simulator.step(f"click [{number}]").observation for number in (12, 3)),
            ]
        finally:
            simulator.close()

    assert play() == play()


def test_a_field_shows_what_is_typed_into_it_and_typing_appends(episode):
    field = episode.number("textbox", "Search")
    shown = episode.step(f"type [{field}] [red] [0]")
    assert "StaticText 'red'" in shown
    assert f"PREVIOUS ACTION: type [{field}] [red] [0] where [{field}] is textbox 'Search'" in shown
    assert "StaticText 'red mug'" in episode.step(f"type [{field}] [ mug] [0]")
    assert "You looked for q=red+mug%21&size=Small" in episode.step(f"type [{field}] [!]")


def test_an_option_is_chosen_by_its_id(episode):
    shown = episode.click("option", "Large")
    assert "option 'Large' selected: True" in shown
    assert "option 'Small' selected: False" in shown
    assert "size=Large" in episode.click("button", "Go")


def test_a_button_in_an_inner_frame_is_reached(episode):
    assert "button 'pressed'" in episode.click("button", "Inner button")


def test_new_tabs_are_listed_and_the_current_one_stays(episode):
    shown = episode.click("link", "New window")
    assert "Tab 0 (current): Mug shop | Tab 1: Popup" in shown
    shown = episode.step("tab_focus [1]")
    assert "Tab 0: Mug shop | Tab 1 (current): Popup" in shown
    shown = episode.click("button", "Close me")  # the page closes itself
    assert "Tab 0 (current): Mug shop\n" in shown
    assert "There is no tab 4" in episode.step("tab_focus [4]")
    assert "Tab 0: Mug shop | Tab 1 (current): \n" in episode.step("new_tab")
    episode.step("close_tab")
    shown = episode.step("close_tab")
    assert "Tab 0 (current): \n" in shown
    assert "URL: about:blank" in shown


def test_history_has_ends(episode):
    before = lines(episode.first)
    assert lines(episode.step("go_forward")) == before
    episode.click("link", "Second page")
    assert "Second page" in episode.step("go_forward")


def test_addresses_are_named_as_webarena_names_them(episode, site):
    shown = episode.step("goto [http://www.onestopmarket.com/second?a=b#c]")
    assert "URL: http://onestopmarket.com/second?a=b#c\n" in shown
    assert "StaticText '12'" in shown
    assert str(site.port) not in shown
    assert "/second?a=b" in [path for _, path in site.asked]


def test_an_observation_has_a_bound(make_spec):
    simulator = make_spec(max_observation_chars=120).make()
    try:
        shown = simulator.reset(0)
        assert "more lines, not shown" in shown
        assert len("\n".join(lines(shown))) < 160
        assert shown.endswith("PREVIOUS ACTION: None")
    finally:
        simulator.close()


def test_a_slow_answer_is_waited_for_and_an_endless_one_is_not(episode, site):
    site.pages["/busy"] = (
        "<title>Busy</title><button onclick=\"fetch('/hang')\">Wait</button><p>ready</p>"
    )
    assert "StaticText 'ready'" in episode.step("goto [onestopmarket.com/busy]")
    assert "StaticText 'ready'" in episode.click("button", "Wait")


def test_the_outcome_is_scored_at_stop_and_the_window_can_be_looked_at(episode):
    media_type, picture = episode.simulator.render()
    assert (media_type, picture[:4]) == ("image/png", b"\x89PNG")
    wrong_form = episode.simulator.step("I give up")
    assert (wrong_form.reward, wrong_form.terminated, wrong_form.info) == (
        0.0,
        False,
        {"family": "shopping", "invalid": True, "error": "action"},
    )
    assert episode.simulator.step("scroll [down]").info == {"family": "shopping"}
    end = episode.simulator.step("```stop [12]```")
    assert (end.reward, end.terminated, end.success) == (1.0, True, True)
    assert end.info["parts"] == {"string_match": {"exact_match": 1.0}}
    assert end.info["family"] == "shopping"
    again = episode.simulator.step("stop [12]")
    assert (again.reward, again.observation) == (0.0, "The episode is over.")
