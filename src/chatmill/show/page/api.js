// Requests to the server, and the state of the page, which is stored in the URL after #.

export async function ask(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== "" && each !== null && each !== undefined) query.append(name, each);
    }
  }
  const words = query.toString();
  let response;
  try {
    response = await fetch(`/api/${path}${words ? `?${words}` : ""}`);
  } catch {
    throw new Error("The viewer does not respond; restart chatmill view.");
  }
  const answer = await response.json().catch(() => ({ error: "The viewer failed; see the error in its terminal." }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const FILTERS = ["role", "rule", "source", "least", "most", "share_from", "share_to"];

export function place() {
  const [view, words] = location.hash.replace(/^#\/?/, "").split("?");
  const params = new URLSearchParams(words ?? "");
  const filters = Object.fromEntries(FILTERS.map((name) => [name, params.getAll(name)]));
  return {
    view: ["order", "audit", "selection"].includes(view) ? view : "episodes",
    split: params.get("split") ?? "",
    q: params.get("q") ?? "",
    sort: params.get("sort") ?? "",
    start: Number(params.get("start") ?? 0) || 0,
    episode: params.has("episode") ? Number(params.get("episode")) : null,
    token: params.has("token") ? Number(params.get("token")) : null,
    seed: params.get("seed"),
    epoch: Number(params.get("epoch") ?? 0) || 0,
    log: Number(params.get("log") ?? 0) || 0,
    step: params.get("step"),
    filters,
  };
}

// Return the URL of a state; omitted parameters keep their current values.
export function address(changes, from = place()) {
  const to = { ...from, ...changes, filters: { ...from.filters, ...changes.filters } };
  const params = new URLSearchParams();
  const put = (name, value, unless = "") => {
    if (value !== null && value !== undefined && value !== unless) params.append(name, value);
  };
  put("split", to.split);
  put("q", to.q);
  put("sort", to.sort);
  for (const name of FILTERS) for (const value of to.filters[name] ?? []) put(name, value);
  put("start", to.start, 0);
  put("episode", to.episode);
  put("token", to.token);
  if (to.view === "order") {
    put("seed", to.seed);
    put("epoch", to.epoch, 0);
  }
  if (to.view === "audit") {
    put("log", to.log, 0);
    put("step", to.step);
  }
  return `#/${to.view}?${params}`;
}

export function go(changes, { replace = false } = {}) {
  const to = address(changes);
  if (to === location.hash) return;
  if (replace) {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = to;
  }
}
