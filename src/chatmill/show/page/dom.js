// Create elements from data; text is always set as text and never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, props = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (key === "data") for (const [word, said] of Object.entries(value)) node.dataset[word] = said;
    else if (key in node && key !== "list" && key !== "form") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

export const count = (number) => number.toLocaleString("en");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

// Draw an episode as a strip of its roles: trained parts are tall and opaque, context is short and faint.
export function strip(map, label) {
  const svg = document.createElementNS(SVG, "svg");
  const total = map.reduce((sum, [, , size]) => sum + size, 0) || 1;
  svg.setAttribute("class", "strip");
  svg.setAttribute("viewBox", "0 0 1000 10");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  let at = 0;
  for (const [role, trained, size] of map) {
    const rect = document.createElementNS(SVG, "rect");
    const width = (1000 * size) / total;
    rect.setAttribute("x", at);
    rect.setAttribute("y", trained ? 0 : 6);
    rect.setAttribute("width", Math.max(width - 1.5, 0.8));
    rect.setAttribute("height", trained ? 10 : 4);
    rect.setAttribute("class", `fill-${role}${trained ? "" : " faint"}`);
    svg.append(rect);
    at += width;
  }
  return svg;
}

export function failure(error) {
  return el("p", { class: "failure", role: "alert" }, error.message);
}
