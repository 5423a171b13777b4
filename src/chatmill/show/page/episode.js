// One episode: its turns and tokens, with panels for the selected token, the source record and the order.

import { address, ask, go, place } from "./api.js";
import { byId, count, el, failure, plural, share, strip } from "./dom.js";
import { legend, stepThrough } from "./list.js";
import { change, marksOf } from "./selection.js";

let open = { key: null, spans: [] };
let asked = 0;

export async function showEpisode(reader, side, at, about) {
  const key = `${at.split} ${at.episode} ${at.q}`;
  if (key !== open.key) {
    const mine = ++asked;
    try {
      const answer = await ask(`${at.split}/episode/${at.episode}`, { q: at.q });
      if (mine !== asked) return;
      draw(reader, side, answer, at, about);
      open = { ...open, key };
    } catch (error) {
      if (mine !== asked) return;
      reader.replaceChildren(failure(error));
      side.replaceChildren();
      open = { key: null, spans: [] };
      return;
    }
  }
  await choose(reader, side, at);
}

function draw(reader, side, answer, at, about) {
  open = { key: null, spans: [], found: answer.found, next: answer.stop, tokens: answer.tokens };
  const only = answer.segments.length === 1 ? answer.segments[0] : null;
  const where = only ? placeName(only) : plural(answer.segments.length, "segment");
  const loss = answer.loss === null ? "" : `, loss ${answer.loss.toFixed(3)}`;
  const label = `${plural(answer.tokens, "token")}, ${share(answer.trained, answer.tokens)} trained${loss}`;
  const button = (words, title, act) => el("button", { type: "button", title, on: { click: act } }, words);
  const reading = localStorage.getItem("reading") === "1";
  const body = el("div", { class: `turns${reading ? " reading" : ""}`, data: { last: "" } });
  const mode = button(reading ? "Show tokens" : "Show text", "Text, or token by token", () => {
    const text = body.classList.toggle("reading");
    localStorage.setItem("reading", text ? "1" : "0");
    mode.textContent = text ? "Show tokens" : "Show text";
  });
  const more = el("button", { type: "button", class: "more" }, "");
  const loadMore = async () => {
    more.disabled = true;
    try {
      append(body, await ask(`${at.split}/episode/${at.episode}`, { start: open.next }));
    } catch (error) {
      more.replaceWith(failure(error));
    }
    more.disabled = false;
    sayMore(more);
  };
  more.addEventListener("click", loadMore);
  reader.replaceChildren(
    el(
      "header",
      { class: "episode-head" },
      el("h1", {}, `${answer.split} `, el("b", {}, count(answer.episode))),
      el("p", { class: "where" }, where),
      el(
        "div",
        { class: "actions" },
        mode,
        ...selecting(answer),
        button("↑", "Previous episode (k)", () => stepThrough(-1)),
        button("↓", "Next episode (j)", () => stepThrough(1)),
      ),
      strip(answer.map, label),
      el("p", { class: "small" }, label),
    ),
    body,
    more,
    el("footer", {}, legend()),
  );
  append(body, answer);
  sayMore(more);
  listen(body, at);
  const parts = [
    panel("token", "Token", el("p", { class: "quiet" }, "Select a token to see why it is trained or context.")),
    answer.segments.length > 1 ? segments(answer, body) : null,
    el("div", { class: "record-box" }),
    el("div", { class: "order-box" }),
    nearDuplicates(at),
  ];
  side.replaceChildren(...parts.filter(Boolean));
  record(side.querySelector(".record-box"), at, 0);
  whereabouts(side.querySelector(".order-box"), at, about);
  reader.scrollTo(0, 0);
  if (answer.found) chip(body, answer.found[0])?.scrollIntoView({ block: "center" });
}

// Controls that exclude the episode and tag it.
function selecting(answer) {
  const places = answer.segments.filter((segment) => !segment.padding && segment.entry).map((segment) => segment.entry);
  const marks = marksOf(answer.split, answer.episode);
  const update = (changes) => change(answer.split, answer.episode, changes, places);
  const exclude = el("button", { type: "button", class: "exclude", title: "Exclude the episode from the next dataset (x)" }, "Exclude");
  exclude.setAttribute("aria-pressed", String(marks.excluded));
  exclude.addEventListener("click", () => {
    const excluded = exclude.getAttribute("aria-pressed") !== "true";
    update({ excluded });
    exclude.setAttribute("aria-pressed", String(excluded));
  });
  const tags = el("input", {
    class: "tags",
    type: "text",
    value: marks.tags.join(", "),
    placeholder: "tags",
    title: "Tags, separated by commas (t)",
    "aria-label": "Tags, separated by commas",
    maxLength: 200,
    on: {
      change: (event) => {
        const words = event.target.value.split(",").map((word) => word.trim());
        update({ tags: [...new Set(words.filter(Boolean))] });
      },
    },
  });
  return [exclude, tags];
}

function sayMore(more) {
  const left = open.tokens - open.next;
  more.hidden = left <= 0;
  more.textContent = `${plural(left, "token")} more`;
}

const placeName = (segment) => (segment.file === null ? "–" : `${segment.file}:${segment.line}`);

const panel = (name, title, ...children) =>
  el("section", { class: `panel panel-${name}`, "aria-label": title }, el("h2", {}, title), ...children);

// Tokens.

function append(body, answer) {
  open.spans.push(...answer.spans);
  open.next = answer.stop;
  let span = 0;
  for (const turn of answer.turns) {
    const segment = answer.segments[turn.segment];
    const begins = turn.start >= answer.start;
    if (begins && answer.segments.length > 1 && turn.start === segment.start) body.append(border(answer, turn.segment));
    if (begins && turn.missing) body.append(el("p", { class: "missing" }, missing(turn.missing)));
    const holder = begins ? null : body.querySelector(".turn:last-of-type .tokens");
    const tokens = holder ?? el("p", { class: "tokens" });
    const stop = Math.min(turn.stop, answer.stop);
    for (let at = Math.max(turn.start, answer.start); at < stop; at++) {
      while (answer.spans[span].stop <= at) span++;
      tokens.append(...token(answer, answer.spans[span], at));
    }
    if (!holder) body.append(turnOf(turn, tokens));
  }
}

function border(answer, number) {
  const segment = answer.segments[number];
  const words = segment.padding ? "padding" : `segment ${number} · ${placeName(segment)}`;
  return el("h2", { class: "border", data: { segment: number } }, el("span", {}, words));
}

const missing = ([first, last]) =>
  first === last ? `Message ${first} is not in this row.` : `Messages ${first} to ${last} are not in this row.`;

function turnOf(turn, tokens) {
  const size = turn.stop - turn.start;
  return el(
    "section",
    { class: `turn r-${turn.role}`, "aria-label": turn.name },
    el(
      "h3",
      {},
      el("span", { class: "role" }, turn.name),
      el("span", { class: "small" }, turn.trained ? `${count(turn.trained)} of ${count(size)} trained` : ""),
    ),
    turn.notes.map((note) => el("p", { class: "note" }, note)),
    tokens,
  );
}

function token(answer, span, at) {
  const text = answer.texts[at - answer.start];
  const found = open.found && at >= open.found[0] && at < open.found[1];
  const classes = ["t", `r-${span.role}`, `p-${span.part}`];
  if (span.weight > 0) classes.push("w");
  if (found) classes.push("hit");
  const node = el("span", { class: classes.join(" "), data: { n: at, id: answer.ids[at - answer.start] } }, text);
  node.tabIndex = at === 0 ? 0 : -1;
  node.setAttribute("role", "button");
  if (span.target !== null) node.append(el("i", {}, `→${span.target_text}`));
  return text.endsWith("↵") || text.endsWith("\\n") ? [node, document.createElement("br")] : [node];
}

const chip = (body, number) => body.querySelector(`.t[data-n="${number}"]`);

const spanAt = (number) => open.spans.find((span) => span.start <= number && number < span.stop);

function listen(body, at) {
  const tip = byId("tip");
  const over = (event) => {
    const node = event.target.closest(".t");
    if (!node) return;
    const number = Number(node.dataset.n);
    const span = spanAt(number);
    const lines = [
      ["token", count(number)],
      ["id", node.dataset.id],
      ["message", span.message === null ? "none" : `${span.role} ${span.message}`],
      ["part", span.name],
      ["weight", String(span.weight)],
      ["rule", span.rule.replaceAll("_", " ")],
    ];
    tip.replaceChildren(
      el("dl", {}, lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    );
    tip.hidden = false;
    const box = node.getBoundingClientRect();
    const below = box.bottom + tip.offsetHeight + 12 < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  };
  const out = () => {
    tip.hidden = true;
  };
  body.addEventListener("mouseover", over);
  body.addEventListener("focusin", over);
  body.addEventListener("mouseout", out);
  body.addEventListener("focusout", out);
  body.addEventListener("click", (event) => {
    const node = event.target.closest(".t");
    if (node) go({ token: Number(node.dataset.n) });
  });
  body.addEventListener("keydown", (event) => {
    const node = event.target.closest(".t");
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    if (!node) return;
    if (event.key in steps) {
      event.preventDefault();
      const to = chip(body, Number(node.dataset.n) + steps[event.key]);
      if (to) focus(body, to);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      go({ token: Number(node.dataset.n) });
    }
  });
}

function focus(body, node) {
  for (const each of body.querySelectorAll('.t[tabindex="0"]')) each.tabIndex = -1;
  node.tabIndex = 0;
  node.focus();
}

// Panels next to the tokens.

async function choose(reader, side, at) {
  const body = reader.querySelector(".turns");
  for (const each of body.querySelectorAll(".t.chosen")) each.classList.remove("chosen");
  if (at.token === null) return;
  const node = chip(body, at.token);
  node?.classList.add("chosen");
  const box = side.querySelector(".panel-token");
  try {
    const said = await ask(`${at.split}/episode/${at.episode}/token/${at.token}`);
    if (place().token !== at.token) return;
    const lines = [
      ["token", `${said.token}${said.segment ? `, number ${said.position} of segment ${said.segment}` : ""}`],
      ["id", String(said.id)],
      ["text", said.text],
      ["trained as", said.target === null ? null : `${said.target_text} (id ${said.target})`],
      ["from", said.file === null ? null : `${said.file}:${said.line}`],
      ["source", said.source],
      ["message", said.message === null ? null : `${said.role} ${said.message}`],
      ["part", said.name],
      ["weight", String(said.weight)],
      ["rule", said.rule.replaceAll("_", " ")],
    ].filter(([, value]) => value !== null);
    box.replaceChildren(
      el("h2", {}, "Token"),
      el("p", { class: `sentence${said.weight > 0 ? " trained" : ""}` }, said.sentence),
      el("dl", { class: "facts" }, lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("p", { class: "quiet" }, el("code", {}, `chatmill explain … ${said.episode}:${said.token} --split ${said.split}`)),
    );
  } catch (error) {
    box.replaceChildren(el("h2", {}, "Token"), failure(error));
  }
}

// List the conversations that are packed into the row.
function segments(answer, body) {
  const lines = answer.segments.map((segment, number) => {
    const open = () => {
      body.querySelector(`.border[data-segment="${number}"]`)?.scrollIntoView({ block: "start" });
      if (!segment.padding) record(document.querySelector(".record-box"), place(), number);
    };
    const name = segment.padding ? "padding" : placeName(segment).split("/").at(-1);
    const button = el("button", { type: "button", class: "plain", on: { click: open } }, name);
    const size = el("span", { class: "small" }, plural(segment.stop - segment.start, "token"));
    return el("li", {}, el("div", {}, button, size));
  });
  return panel("segments", "Packed together", el("ol", { class: "lines", start: 0 }, lines));
}

async function record(box, at, segment) {
  try {
    const said = await ask(`${at.split}/episode/${at.episode}/record/${segment}`);
    const notes = {
      true: ["good", "The record is unchanged since the dataset was prepared."],
      false: ["bad", "The record has changed since the dataset was prepared."],
      null: ["quiet", "The dataset does not store a hash of the record."],
    };
    const [tone, words] = notes[String(said.same)];
    box.replaceChildren(
      panel(
        "record",
        "Record",
        el("p", { class: "quiet" }, said.place, said.as_read ? ", as it was read" : ""),
        el("p", { class: tone }, words),
        el("pre", { tabIndex: 0 }, said.text),
        said.cut ? el("p", { class: "quiet" }, "Only the beginning of the record is shown.") : null,
      ),
    );
  } catch (error) {
    box.replaceChildren(panel("record", "Record", el("p", { class: "quiet" }, error.message)));
  }
}

async function whereabouts(box, at, about) {
  const epoch = el("input", { type: "number", min: "0", value: "0", "aria-label": "Epoch" });
  const seed = el("input", { type: "number", min: "0", value: String(about.order.seed), "aria-label": "Seed" });
  const said = el("div", {});
  const link = (number) =>
    el("a", { href: address({ view: "episodes", episode: number, token: null }, at) }, `#${count(number)}`);
  const list = (numbers) => (numbers.length ? numbers.map((number) => [link(number), " "]) : "–");
  const look = async () => {
    try {
      const found = await ask(`${at.split}/episode/${at.episode}/order`, { seed: seed.value, epoch: epoch.value });
      const lines = [
        ["position", count(found.position)],
        ["before", list(found.before)],
        ["after", list(found.after)],
      ];
      if (about.order.packing !== "none") {
        lines.push(["row", `${count(found.row)} of window ${found.window}`], ["shares it with", list(found.shares_row_with)]);
      }
      said.replaceChildren(
        el("dl", { class: "facts" }, lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
        el("p", { class: "quiet" }, `order ${found.order}`),
      );
    } catch (error) {
      said.replaceChildren(el("p", { class: "quiet" }, error.message));
    }
  };
  epoch.addEventListener("change", look);
  seed.addEventListener("change", look);
  const fields = el("p", { class: "fields" }, el("label", {}, "epoch ", epoch), el("label", {}, "seed ", seed));
  box.replaceChildren(panel("order", "In the epoch", fields, said));
  await look();
}

// Find near-duplicates only on request, because the first request reads many episodes.
function nearDuplicates(at) {
  const result = el("div", { role: "status" });
  let comparing = false;
  const compare = async () => {
    if (comparing) return;
    comparing = true;
    result.replaceChildren(el("p", { class: "quiet" }, "Comparing …"));
    try {
      const answer = await ask(`${at.split}/episode/${at.episode}/near`);
      const lines = answer.episodes.map((each) => {
        const href = address({ view: "episodes", episode: each.episode, token: null }, at);
        const link = el("a", { href }, `#${count(each.episode)} ${each.words}`);
        return el("li", {}, el("div", {}, link, el("span", { class: "small" }, share(each.similarity, 1))));
      });
      const all = plural(answer.of, "episode");
      const others = answer.compared < answer.of ? `the first ${count(answer.compared)} of ${all}` : `all ${all}`;
      result.replaceChildren(
        lines.length ? el("ul", { class: "lines" }, lines) : el("p", {}, "No near-duplicates found."),
        el("p", { class: "quiet" }, `Compared with ${others}. Lists episodes that share at least ${share(answer.least, 1)} of their 5-token sequences (estimated).`),
      );
    } catch (error) {
      result.replaceChildren(failure(error));
    }
    comparing = false;
  };
  const button = el("button", { type: "button", on: { click: compare } }, "Find near-duplicates");
  return panel("near", "Near-duplicates", el("div", {}, button), result);
}
