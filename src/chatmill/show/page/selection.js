// Tags and exclusions of episodes, which are stored only in this browser and never sent to the server.

import { address, ask } from "./api.js";
import { count, el, failure, plural } from "./dom.js";

const MOST = 10000;
let dataset = "";

export function selectionOf(about) {
  dataset = about.sha256 ?? about.path;
}

const name = (split) => `selection ${dataset} ${split}`;

function load(split) {
  try {
    return JSON.parse(localStorage.getItem(name(split))) ?? {};
  } catch {
    return {};
  }
}

export function marksOf(split, episode) {
  return load(split)[episode] ?? { tags: [], excluded: false, places: [] };
}

// Change the tags or the exclusion of an episode. `places` has one exclude-list line per conversation of the episode.
export function change(split, episode, changes, places) {
  const all = load(split);
  const marks = { ...marksOf(split, episode), ...changes, places };
  if (marks.tags.length || marks.excluded) all[episode] = marks;
  else delete all[episode];
  if (Object.keys(all).length > MOST) throw new Error(`At most ${count(MOST)} episodes can be tagged or excluded.`);
  localStorage.setItem(name(split), JSON.stringify(all));
  dispatchEvent(new Event("selection"));
  return marks;
}

export function badges(split, episode) {
  const marks = marksOf(split, episode);
  const words = [...(marks.excluded ? ["excluded"] : []), ...marks.tags];
  return words.length ? el("span", { class: "badges" }, words.map((word) => el("span", {}, word))) : null;
}

export async function showSelection(content, at) {
  const rows = Object.entries(load(at.split)).sort(([one], [other]) => one - other);
  const tags = [...new Set(rows.flatMap(([, marks]) => marks.tags))].sort();
  const which = el(
    "select",
    { id: "which" },
    el("option", { value: "excluded" }, "excluded episodes"),
    tags.map((tag) => el("option", { value: `tag ${tag}` }, `episodes tagged ${tag}`)),
  );
  const chosen = () =>
    rows.filter(([, marks]) => (which.value === "excluded" ? marks.excluded : marks.tags.includes(which.value.slice(4))));
  const words = el("p", { class: "quiet", role: "status" }, "");
  const button = (text, act) => el("button", { type: "button", on: { click: act } }, text);
  const asList = () => {
    const places = [...new Set(chosen().flatMap(([, marks]) => marks.places))];
    save("exclude.jsonl", places);
    words.textContent = `exclude.jsonl: ${plural(places.length, "record")}. Pass it to chatmill prepare with --exclude exclude.jsonl.`;
  };
  const asRecords = async () => {
    const lines = [];
    try {
      for (const [episode] of chosen()) {
        lines.push(...(await ask(`${at.split}/episode/${episode}/lines`)).lines);
        words.textContent = `${plural(lines.length, "record")} read`;
      }
      save("records.jsonl", lines);
      words.textContent = `records.jsonl: ${plural(lines.length, "record")}.`;
    } catch (error) {
      words.replaceChildren(failure(error));
    }
  };
  const line = ([episode, marks]) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, el("a", { href: address({ view: "episodes", episode, token: null }, at) }, `#${count(Number(episode))}`)),
      el("td", {}, marks.excluded ? "excluded" : ""),
      el("td", {}, marks.tags.join(", ")),
    );
  const table = el(
    "table",
    { class: "selected" },
    el("thead", {}, el("tr", {}, ["Episode", "Excluded", "Tags"].map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, rows.map(line)),
  );
  content.replaceChildren(
    el(
      "div",
      { class: "page" },
      el(
        "header",
        { class: "page-head" },
        el("h1", {}, "Selection"),
        el("p", {}, `${plural(rows.length, "episode")} of ${at.split} tagged or excluded. The selection is stored in this browser only.`),
      ),
      rows.length
        ? [
            el("p", { class: "fields" }, el("label", { htmlFor: "which" }, "Export "), which, button("As exclude list", asList), button("As JSONL records", asRecords)),
            words,
            table,
          ]
        : el("p", { class: "quiet" }, "Open an episode, then press x to exclude it or t to tag it."),
    ),
  );
}

function save(file, lines) {
  const url = URL.createObjectURL(new Blob([lines.map((line) => `${line}\n`).join("")], { type: "application/jsonl" }));
  el("a", { href: url, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
