// Pages work without this: it adds keys, follows a run, and looks whether a replay is there.
"use strict";

const all = (selector) => Array.from(document.querySelectorAll(selector));
const steps = () => all(".turn, .rows tbody tr");
let at = -1;

function go(by) {
  const places = steps();
  if (!places.length) return;
  at = Math.max(0, Math.min(places.length - 1, at + by));
  places.forEach((place, index) => place.classList.toggle("at", index === at));
  const place = places[at];
  place.scrollIntoView({ block: "nearest" });
  const focus = place.querySelector("a.open") || place;
  focus.focus({ preventScroll: true });
  if (place.id) history.replaceState(null, "", "#" + place.id);
}

function follow(address) {
  if (address) location.assign(address);
}

const KEYS = {
  j: ["the next turn, or row", () => go(1)],
  k: ["the one before", () => go(-1)],
  o: ["open the row", () => follow(steps()[at]?.querySelector("a.open")?.href)],
  n: ["the next episode, or page", () => follow(document.querySelector('a[rel="next"]')?.href)],
  p: ["the one before", () => follow(document.querySelector('a[rel="prev"]')?.href)],
  t: ["the next color of tokens", () => {
    const links = all(".overlays a");
    const now = links.findIndex((link) => link.hasAttribute("aria-current"));
    follow(links[(now + 1) % links.length]?.href);
  }],
  r: ["draw the environment", () => document.querySelector("[data-replay]")?.requestSubmit()],
  g: ["the runs", () => follow(document.querySelector(".brand")?.href)],
  "/": ["search", () => document.querySelector('[type="search"]')?.focus()],
  "?": ["this list", () => help()],
};

function help() {
  const open = document.querySelector("dialog");
  if (open) return open.remove();
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-label", "keys");
  const list = document.createElement("dl");
  for (const [key, [title]] of Object.entries(KEYS)) {
    const term = document.createElement("dt");
    term.appendChild(document.createElement("kbd")).textContent = key;
    const told = document.createElement("dd");
    told.textContent = title;
    list.append(term, told);
  }
  dialog.append(list);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest?.("input, textarea, select");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const found = KEYS[event.key];
  if (!found) return;
  event.preventDefault();
  found[1]();
});

// what an address names by #turn-3 is where keys go on from
const named = () => {
  const place = location.hash && document.getElementById(location.hash.slice(1));
  if (place) at = steps().indexOf(place);
};
named();
addEventListener("hashchange", named);

// a replay that is under way: look until it is there, then show it
const replay = document.querySelector("[data-replay]");
async function waitForReplay() {
  for (let tries = 0; tries < 300; tries++) {
    await new Promise((done) => setTimeout(done, Math.min(400 + 100 * tries, 3000)));
    const reply = await fetch(replay.dataset.replay.split("?")[0]);
    if (!reply.ok || !(await reply.json()).waiting) break;
  }
  location.reload();
}
if (replay?.querySelector("button:disabled")) waitForReplay();

// a run under way: say that there is news; a page that follows loads it by itself
const state = document.body.dataset.state;
if (state && document.body.dataset.stamp) {
  const news = document.getElementById("news");
  news.querySelector("a").href = location.href.split("#")[0];
  const check = async () => {
    if (document.hidden) return;
    try {
      const reply = await fetch(state);
      const told = reply.ok ? await reply.json() : null;
      if (!told || told.stamp === document.body.dataset.stamp) return;
      if (document.querySelector("[data-follow]")) location.reload();
      else news.hidden = false;
    } catch { /* the server is away; the next look may find it */ }
  };
  setInterval(check, 3000);
}

// a policy that is watched goes on by itself where that is asked for
const watch = document.getElementById("watch");
if (watch) {
  const on = () => setTimeout(() => watch.checked && watch.form.requestSubmit(watch.form.querySelector("button")), 700);
  watch.checked = new URLSearchParams(location.search).get("watch") === "yes";
  watch.addEventListener("change", on);
  on();
}
document.querySelector("[autofocus]")?.scrollIntoView({ block: "center" });
