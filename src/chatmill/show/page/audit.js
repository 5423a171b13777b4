// Audit logs: the lines that a run wrote, and the rows that it loaded at a step.

import { address, ask, go } from "./api.js";
import { count, el, failure, plural } from "./dom.js";
import { item } from "./list.js";

const WORDS = {
  dataset_load: "dataset",
  epoch_start: "epoch begins",
  steps: "steps",
  drop_last: "left over",
  epoch_complete: "epoch ends",
  mix: "mix",
  checkpoint: "checkpoint",
  resume: "resumed",
  torn: "torn",
};

export async function showAudit(content, at, about) {
  if (!about.logs.length) {
    content.replaceChildren(
      el(
        "div",
        { class: "page" },
        el("header", { class: "page-head" }, el("h1", {}, "Audit"), el("p", {}, "No audit log is open.")),
        el("p", { class: "quiet" }, "Start the viewer with ", el("code", {}, "--audit LOG"), " to open a log or a folder of logs."),
      ),
    );
    return;
  }
  const log = Math.min(at.log, about.logs.length - 1);
  let answer;
  try {
    answer = await ask(`audit/${log}`, { start: at.start });
  } catch (error) {
    content.replaceChildren(el("div", { class: "page" }, failure(error)));
    return;
  }
  const step = el("input", {
    type: "number",
    min: "0",
    max: String(Math.max(0, answer.steps - 1)),
    value: at.step ?? "",
    placeholder: answer.steps ? `0 to ${answer.steps - 1}` : "",
    id: "step",
  });
  const form = el(
    "form",
    { class: "fields" },
    el("label", { htmlFor: "step" }, "Rows of step "),
    step,
    el("button", { type: "submit" }, "Show"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go({ step: step.value === "" ? null : step.value });
  });
  const logs = about.logs.map((name, number) =>
    el("a", { href: address({ log: number, start: 0, step: null }, at), "aria-current": number === log ? "true" : null }, name),
  );
  const rows = el("div", { class: "step-rows" });
  content.replaceChildren(
    el(
      "div",
      { class: "page two" },
      el(
        "section",
        { "aria-label": "Timeline" },
        el(
          "header",
          { class: "page-head" },
          el("h1", {}, "Audit"),
          el("nav", { class: "splits", "aria-label": "Logs" }, logs),
          el("p", { class: "quiet" }, `${plural(answer.of, "line")}, ${plural(answer.steps, "step")}`),
        ),
        el("ol", { class: "timeline", start: at.start + 1 }, answer.lines.map((line) => lineOf(line, at))),
        pager(at, answer),
      ),
      el("section", { "aria-label": "Rows of a step" }, form, rows),
    ),
  );
  if (at.step !== null) await showStep(rows, log, at);
}

function lineOf(line, at) {
  const first = line.fields.first_step;
  const steps =
    first === undefined
      ? null
      : el("a", { href: address({ step: first }, at) }, `steps ${first} to ${Number(line.fields.stop_step) - 1}`);
  const facts = Object.entries(line.fields).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return el(
    "li",
    { class: `event a-${line.action in WORDS ? line.action : "torn"}${line.abandoned ? " abandoned" : ""}` },
    el(
      "div",
      { class: "line" },
      el("b", {}, steps ?? WORDS[line.action] ?? line.action),
      line.abandoned ? el("span", { class: "note" }, "abandoned by a resumed run") : null,
      el("time", {}, line.time.replace("T", " ").replace("Z", "")),
    ),
    el("details", {}, el("summary", {}, summary(line)), el("dl", { class: "facts" }, facts)),
  );
}

function summary(line) {
  const said = line.fields;
  const words = {
    dataset_load: () => `${said.num_episodes} episodes of ${said.split}, order ${said.order}, seed ${said.epoch_seed}`,
    epoch_start: () => `epoch ${said.epoch}, seed ${said.seed}, first ${said.first_episode_ids}`,
    steps: () => `digest ${(said.digest ?? "").slice(0, 16)}…`,
    drop_last: () => `${said.num_episodes} episodes that do not fill a batch`,
    epoch_complete: () => `epoch ${said.epoch}: ${said.episodes_seen} episodes by step ${said.step}`,
    checkpoint: () => `at step ${said.step}`,
    resume: () => `from step ${said.step}`,
    mix: () => `realised ${said.realised}`,
    torn: () => said.why,
  };
  return (words[line.action] ?? (() => "details"))();
}

function pager(at, answer) {
  const button = (words, start) => el("button", { type: "button", on: { click: () => go({ start }) } }, words);
  const next = at.start + answer.lines.length;
  return el(
    "nav",
    { class: "pager", "aria-label": "Pages of the log" },
    at.start > 0 ? button("← Back", Math.max(0, at.start - 200)) : el("span"),
    next < answer.of ? button("More →", next) : el("span"),
  );
}

async function showStep(box, log, at) {
  box.replaceChildren(el("p", { class: "quiet" }, "Reading the rows …"));
  try {
    const found = await ask(`audit/${log}/step/${Number(at.step)}`);
    const from = { ...at, split: found.split };
    box.replaceChildren(
      el("h2", {}, `Step ${count(found.step)}`),
      el("p", { class: "good" }, `${plural(found.of, "row")} of epoch ${found.epoch}, read again from the dataset; line ${found.line} of the log has their digest.`),
      ...found.rows.map((row, number) =>
        el("div", { class: "position" }, el("span", { class: "number" }, String(number)), el("ol", { class: "items" }, row.map((each) => item(each, from)))),
      ),
    );
    box.append(...(found.of > found.rows.length ? [el("p", { class: "quiet" }, `Only the first ${found.rows.length} rows are shown.`)] : []));
  } catch (error) {
    box.replaceChildren(failure(error));
  }
}
