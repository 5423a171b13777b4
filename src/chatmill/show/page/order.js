// The order of an epoch: which episode is at which position.

import { ask, go } from "./api.js";
import { count, el, failure, plural } from "./dom.js";
import { item } from "./list.js";

export async function showOrder(content, at, about) {
  const seed = at.seed ?? String(about.order.seed);
  const field = (name, value) =>
    el(
      "label",
      {},
      `${name} `,
      el("input", {
        type: "number",
        min: "0",
        value: String(value),
        on: { change: (event) => go({ [name]: name === "seed" ? event.target.value : Number(event.target.value), start: 0 }) },
      }),
    );
  const head = (words) =>
    el(
      "header",
      { class: "page-head" },
      el("h1", {}, "The order of an epoch"),
      el("p", {}, words),
      el("p", { class: "fields" }, field("epoch", at.epoch), field("seed", seed)),
    );
  let found;
  try {
    found = await ask(`${at.split}/order`, { seed, epoch: at.epoch, start: at.start });
  } catch (error) {
    content.replaceChildren(el("div", { class: "page" }, head(""), failure(error)));
    return;
  }
  const length = found.length === null ? "endless" : plural(found.length, "position");
  const rows = found.episodes.map((each, number) =>
    el("div", { class: "position" }, el("span", { class: "number" }, count(found.start + number)), el("ol", { class: "items" }, item(each, at))),
  );
  const next = found.start + found.episodes.length;
  const ended = found.length !== null && next >= found.length;
  const button = (words, start) => el("button", { type: "button", on: { click: () => go({ start }) } }, words);
  content.replaceChildren(
    el(
      "div",
      { class: "page" },
      head(`${found.order}, ${length}. The same dataset and seed always give this order.`),
      el("div", { class: "positions" }, rows),
      el(
        "nav",
        { class: "pager", "aria-label": "Pages of the order" },
        at.start > 0 ? button("← Back", Math.max(0, at.start - 50)) : el("span"),
        ended ? el("span") : button("More →", next),
      ),
    ),
  );
}
