// The page: its header, its four views, and global keyboard shortcuts.

import { address, ask, go, place } from "./api.js";
import { showAudit } from "./audit.js";
import { byId, count, el, failure } from "./dom.js";
import { refreshFilters, showEpisodes, stepThrough } from "./list.js";
import { showOrder } from "./order.js";
import { selectionOf, showSelection } from "./selection.js";

const VIEWS = { episodes: ["Episodes", showEpisodes], order: ["Order", showOrder], audit: ["Audit", showAudit], selection: ["Selection", showSelection] };
let about = null;
let shown = null;

async function start() {
  try {
    about = await ask("about");
  } catch (error) {
    byId("content").replaceChildren(failure(error));
    return;
  }
  selectionOf(about);
  document.title = `${about.name} – chatmill`;
  byId("dataset").textContent = about.preview ? `${about.name} (not prepared)` : about.name;
  byId("dataset").title = about.preview ? about.preview.note : `${about.path}, ${about.sha256 ? `sha256 ${about.sha256}` : "written by another program"}`;
  const query = byId("query");
  if (about.without_text) {
    query.disabled = true;
    query.placeholder = "No text to search: the tokenizer was not found";
    query.title = about.without_text;
  }
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    go({ view: "episodes", q: query.value, start: 0, episode: null, token: null });
  });
  let typing = 0;
  query.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => go({ view: "episodes", q: query.value, start: 0 }, { replace: true }), 250);
  });
  addEventListener("hashchange", show);
  addEventListener("keydown", key);
  await show();
  await watchIndex();
}

async function show() {
  const at = place();
  if (!(at.split in about.splits)) {
    const splits = Object.entries(about.splits);
    at.split = (splits.find(([, each]) => each.episodes) ?? splits[0])[0];
    history.replaceState(null, "", address({ split: at.split }, at));
  }
  drawHead(at);
  const query = byId("query");
  if (document.activeElement !== query) query.value = at.q;
  const fresh = shown !== `${at.view} ${at.split}`;
  shown = `${at.view} ${at.split}`;
  try {
    await VIEWS[at.view][1](byId("content"), at, about, fresh);
  } catch (error) {
    byId("content").replaceChildren(failure(error));
    shown = null;
  }
}

function drawHead(at) {
  const tabs = Object.entries(VIEWS).map(([view, [name]]) =>
    el("a", { href: address({ view }, at), "aria-current": view === at.view ? "page" : null }, name),
  );
  byId("tabs").replaceChildren(...tabs);
  const splits = Object.entries(about.splits).map(([split, each]) =>
    el(
      "a",
      {
        href: address({ split, start: 0, sort: "", episode: null, token: null, filters: { source: [] } }, at),
        "aria-current": split === at.split ? "true" : null,
        title: `${count(each.tokens)} tokens`,
      },
      split,
      el("small", {}, count(each.episodes)),
    ),
  );
  byId("splits").replaceChildren(...splits);
}

// Show the progress of building the index.
async function watchIndex() {
  let progress = about.index;
  for (;;) {
    const all = Object.values(progress);
    const broken = all.find((each) => each.error);
    const text = about.without_text ? "filtered" : "searched";
    const done = all.reduce((sum, each) => sum + each.filtered + each[text], 0);
    const whole = all.reduce((sum, each) => sum + 2 * each.episodes, 0);
    byId("indexing").hidden = !broken && done >= whole;
    byId("indexing-bar").style.width = `${(100 * done) / (whole || 1)}%`;
    byId("indexing-words").textContent = broken
      ? `The index could not be built: ${broken.error}`
      : `Building the index for filters and search: ${Math.floor((100 * done) / (whole || 1))}%`;
    if (broken || done >= whole) {
      about.index = progress;
      refreshFilters(place(), about);
      return;
    }
    await new Promise((resume) => setTimeout(resume, 700));
    try {
      progress = await ask("progress");
    } catch {
      return;
    }
  }
}

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const writing = ["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement?.tagName);
  if (event.key === "Escape" && writing) document.activeElement.blur();
  if (writing) return;
  if (event.key === "/") {
    event.preventDefault();
    byId("query").focus();
    byId("query").select();
  } else if (event.key === "j" || event.key === "k") {
    stepThrough(event.key === "j" ? 1 : -1);
  } else if (event.key === "x") {
    document.querySelector(".exclude")?.click();
  } else if (event.key === "t") {
    event.preventDefault();
    document.querySelector(".tags")?.focus();
  }
}

start();
