// The list of episodes, one page at a time, with filters and search.

import { address, ask, go, place } from "./api.js";
import { count, el, failure, plural, share, strip } from "./dom.js";
import { showEpisode } from "./episode.js";
import { badges } from "./selection.js";

const PAGE = 50;
let shown = { key: null, start: 0, numbers: [], next: null };
let before = [];
let asked = 0;

export async function showEpisodes(content, at, about, fresh) {
  if (fresh || !content.querySelector(".browse")) {
    content.replaceChildren(
      el(
        "div",
        { class: "browse" },
        el("section", { class: "finder", "aria-label": "Episodes" }, filters(at, about), sorting(at, about), el("div", { class: "found" })),
        el("article", { class: "reader", "aria-label": "Episode" }),
        el("aside", { class: "side", "aria-label": "About the token and the episode" }),
      ),
    );
    shown = { key: null, start: 0, numbers: [], next: null };
    before = [];
  }
  content.querySelector(".sorting select").value = at.sort;
  const key = JSON.stringify([at.split, at.q, at.sort, at.filters]);
  if (key !== shown.key) before = [];
  const listing = key !== shown.key || at.start !== shown.start ? list(content.querySelector(".found"), at, key) : null;
  content.querySelector(".browse").classList.toggle("empty", at.episode === null);
  if (at.episode !== null) {
    await showEpisode(content.querySelector(".reader"), content.querySelector(".side"), at, about);
  } else {
    content.querySelector(".reader").replaceChildren(welcome(at, about));
    content.querySelector(".side").replaceChildren();
  }
  await listing;
  mark(at);
}

// Redraw the filters when the values in the split are indexed.
export function refreshFilters(at, about) {
  const old = document.querySelector(".filter-box");
  if (!old) return;
  const box = filters(at, about);
  box.open = old.open;
  old.replaceWith(box);
}

function welcome(at, about) {
  const split = about.splits[at.split];
  const keys = [
    ["/", "search"],
    ["j k", "next and previous episode"],
    ["← →", "from token to token"],
    ["Enter", "explain a token"],
    ["x", "exclude the episode, or include it again"],
    ["t", "tag the episode"],
  ];
  return el(
    "div",
    { class: "welcome" },
    el("h1", {}, "Select an episode"),
    el("p", {}, `${at.split} has ${plural(split.episodes, "episode")} with ${plural(split.tokens, "token")}.`),
    about.preview ? preview(about.preview) : null,
    about.without_text ? el("p", { class: "note" }, `Tokens are shown as ids: ${about.without_text}.`) : null,
    el("dl", { class: "keys" }, keys.map(([name, does]) => [el("dt", {}, el("kbd", {}, name)), el("dd", {}, does)])),
    legend(),
  );
}

function preview({ note, faults }) {
  return el(
    "div",
    { class: "preview" },
    el("p", {}, note),
    faults.length ? el("p", {}, "Records that cannot be read:") : null,
    faults.length ? el("ul", {}, faults.map((fault) => el("li", {}, fault))) : null,
  );
}

export function legend() {
  const roles = ["system", "user", "assistant", "tool"];
  return el(
    "p",
    { class: "legend" },
    roles.map((role) => el("span", { class: `sample r-${role}` }, role)),
    el("span", { class: "sample r-assistant w" }, "trained"),
    el("span", { class: "sample r-assistant" }, "context"),
  );
}

// Sorting.

const SORTS = {
  longest: "longest first",
  shortest: "shortest first",
  most_trained: "largest trained share first",
  least_trained: "smallest trained share first",
  highest_loss: "highest loss first",
  lowest_loss: "lowest loss first",
};

function sorting(at, about) {
  return el(
    "label",
    { class: "sorting" },
    el("span", {}, "Sort"),
    el(
      "select",
      { name: "sort", on: { change: (event) => go({ sort: event.target.value, start: 0 }) } },
      el("option", { value: "" }, "dataset order"),
      about.splits[at.split].sorts.map((name) => el("option", { value: name }, SORTS[name])),
    ),
  );
}

// Filters.

function filters(at, about) {
  const now = at.filters;
  const pills = (name, words, title) =>
    el(
      "fieldset",
      {},
      el("legend", {}, title),
      words.map((word) =>
        el(
          "label",
          { class: "pill" },
          el("input", {
            type: "checkbox",
            name,
            value: word,
            checked: now[name].includes(word),
            on: { change: (event) => changed(event.target.form) },
          }),
          el("span", {}, word.replaceAll("_", " ")),
        ),
      ),
    );
  const range = (title, low, high, most, unit) =>
    el(
      "fieldset",
      { class: "range" },
      el("legend", {}, title),
      [low, high].map((name) =>
        el("input", {
          type: "number",
          name,
          min: "0",
          max: most,
          step: "any",
          value: now[name][0] === undefined ? "" : String(unit * now[name][0]),
          placeholder: name === low ? "from" : "to",
          "aria-label": `${title} ${name === low ? "from" : "to"}`,
          on: { change: (event) => changed(event.target.form) },
        }),
      ),
    );
  const sources = about.splits[at.split].sources;
  const source = el(
    "fieldset",
    {},
    el("legend", {}, "Source"),
    el(
      "select",
      { name: "source", "aria-label": "Source", on: { change: (event) => changed(event.target.form) } },
      el("option", { value: "" }, "any"),
      sources.map((name) => el("option", { value: name, selected: now.source[0] === name }, name)),
    ),
  );
  const chosen = Object.values(now).flat().length;
  const form = el(
    "form",
    { class: "filters" },
    pills("role", known(about, at, "roles"), "Role"),
    range("Tokens", "least", "most", null, 1),
    range("Trained, %", "share_from", "share_to", "100", 100),
    sources.length > 1 ? source : null,
    pills("rule", known(about, at, "rules"), "Rule"),
    el("button", { type: "button", class: "plain", on: { click: () => clear(form) } }, "Clear all"),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  return el("details", { class: "filter-box", open: chosen > 0 }, el("summary", {}, "Filters"), form);
}

// Return the values in the split or, until they are indexed, all values. Selected values are always included.
function known(about, at, name) {
  const chosen = at.filters[name.slice(0, -1)];
  const present = about.index[at.split][name];
  return about[name].filter((word) => present === null || present.includes(word) || chosen.includes(word));
}

function changed(form) {
  const said = new FormData(form);
  const one = (name, unit = 1) => (said.get(name) ? [String(Number(said.get(name)) / unit)] : []);
  go({
    start: 0,
    filters: {
      role: said.getAll("role"),
      rule: said.getAll("rule"),
      source: said.getAll("source").filter(Boolean),
      least: one("least"),
      most: one("most"),
      share_from: one("share_from", 100),
      share_to: one("share_to", 100),
    },
  });
}

function clear(form) {
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = false;
    else if (field.name) field.value = "";
  }
  changed(form);
}

// The list itself.

async function list(box, at, key) {
  const mine = ++asked;
  const items = el("ol", { class: "items", start: at.start });
  const words = el("p", { class: "status", role: "status" }, "…");
  box.replaceChildren(words, items);
  shown = { key, start: at.start, numbers: [], next: null };
  let next = at.start;
  let answer;
  try {
    do {
      const limit = PAGE - shown.numbers.length;
      answer = await ask(`${at.split}/episodes`, { ...at.filters, q: at.q, sort: at.sort, start: next, limit });
      if (mine !== asked) return;
      for (const each of answer.episodes) {
        items.append(item(each, at));
        shown.numbers.push(each.episode);
      }
      mark(place());
      next = answer.next;
      words.textContent = status(answer, at);
      if (answer.waiting) await new Promise((resume) => setTimeout(resume, 400));
      if (mine !== asked) return;
    } while (next !== null && shown.numbers.length < PAGE);
  } catch (error) {
    words.replaceWith(failure(error));
    return;
  }
  shown.next = next;
  words.textContent = status(answer, at, true);
  box.append(pager(at, next));
}

function status(answer, at, ended = false) {
  const found = shown.numbers.length;
  if (!ended) return `Searching: ${share(answer.looked, answer.of)} of ${plural(answer.of, "episode")}`;
  if (!found && at.start === 0) return `None of ${plural(answer.of, "episode")}`;
  if (answer.matching !== null && answer.matching !== answer.of) {
    return `${count(answer.matching)} of ${plural(answer.of, "episode")}`;
  }
  if (!at.q) return plural(answer.of, "episode");
  if (answer.next !== null) return `${count(found)} found so far, ${share(answer.looked, answer.of)} searched`;
  return at.start > 0 ? `The last ${count(found)}` : `${count(found)} of ${plural(answer.of, "episode")}`;
}

function pager(at, next) {
  const back = at.start > 0 ? el("button", { type: "button", on: { click: () => turn(-1) } }, "← Back") : el("span");
  const jump = el("input", {
    type: "number",
    min: "0",
    placeholder: "number",
    "aria-label": "Open the episode with this number",
    on: {
      change: (event) => event.target.value !== "" && go({ episode: Number(event.target.value), token: null }),
    },
  });
  const on = next === null ? el("span") : el("button", { type: "button", on: { click: () => turn(1) } }, "More →");
  return el("nav", { class: "pager", "aria-label": "Pages of the list" }, back, jump, on);
}

function turn(direction) {
  if (direction > 0) {
    before.push(shown.start);
    go({ start: shown.next });
  } else {
    go({ start: before.pop() ?? 0 });
  }
  document.querySelector(".finder").scrollTo(0, 0);
}

export function item(each, at) {
  const label = `${each.tokens} tokens, ${share(each.trained, each.tokens)} trained`;
  const where = each.segments > 1 ? `${each.segments} segments` : (each.place ?? "");
  const words =
    each.found === undefined
      ? el("p", { class: "words" }, each.words)
      : el("p", { class: "words" }, each.before, el("mark", {}, each.found), each.after);
  return el(
    "li",
    { data: { episode: each.episode } },
    el(
      "a",
      { href: address({ view: "episodes", episode: each.episode, token: null }, at) },
      el("span", { class: "line" }, el("b", {}, `#${count(each.episode)}`), badges(at.split, each.episode), el("span", { class: "where" }, where)),
      strip(each.map, label),
      words,
      el(
        "span",
        { class: "line small" },
        el("span", {}, plural(each.tokens, "token")),
        el("span", {}, `${share(each.trained, each.tokens)} trained`),
        each.loss === null ? null : el("span", {}, `loss ${each.loss.toFixed(3)}`),
      ),
    ),
  );
}

// Show in the list whether an episode is excluded, and its tags.
addEventListener("selection", () => {
  const at = place();
  for (const each of document.querySelectorAll(".items li")) {
    each.querySelector(".badges")?.remove();
    const marks = badges(at.split, each.dataset.episode);
    if (marks) each.querySelector(".line b").after(marks);
  }
});

function mark(at) {
  for (const each of document.querySelectorAll(".items li")) {
    const current = Number(each.dataset.episode) === at.episode;
    each.firstElementChild.toggleAttribute("aria-current", current);
  }
}

// Go to the next or previous episode of the list; after the last episode, open the next page.
export function stepThrough(direction) {
  const at = place();
  if (at.view !== "episodes" || !shown.numbers.length) return;
  const here = shown.numbers.indexOf(at.episode);
  const to = here < 0 ? (direction > 0 ? 0 : shown.numbers.length - 1) : here + direction;
  if (to >= 0 && to < shown.numbers.length) {
    go({ episode: shown.numbers[to], token: null });
    document.querySelector(`.items li[data-episode="${shown.numbers[to]}"]`)?.scrollIntoView({ block: "nearest" });
  } else if (to >= shown.numbers.length && shown.next !== null) {
    turn(1);
  } else if (to < 0 && at.start > 0) {
    turn(-1);
  }
}
