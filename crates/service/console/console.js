"use strict";
// The console of the control service: asks the replica once a second, and draws what is in sight.
// No text of a job is ever taken for markup: all of it goes through textContent.

const LOOK_MS = 1000;
const JOBS = 500;
/** As in the style. */
const ROW_PX = 28;
const COLOURS = ["#2f74c8", "#c2571a", "#2e8b57", "#8a4fbe", "#9a7209", "#b5453f", "#3f8f8f", "#7a8290"];
const by = id => document.getElementById(id);
const VIEWS = ["transfers", "jobs", "hosts", "events"];
const SORTS = ["rate", "left", "served", "weight", "age", "name"];
const ANSWER_MS = 5000;
const TRANSPORTS = ["auto", "shm", "mptcp", "dctcp", "tls", "ictcp", "tcp"];

/** What the address names: view, search, filters, order, the row that is chosen. */
let place = {};
let status = null;
let page = null;
let rates = null;
let happened = [];
let list = [];
let chosen = null;
let failed = null;
let asking = false;
let askedAgain = false;

function make(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function drawing(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (count < 1024 || unit === "TiB") return `${count.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
}

// The service has no number for what cannot be one.
const rate = count => `${bytes(count ?? 0)}/s`;
const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function ago(seconds) {
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  return seconds < 6000 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// ---- where we are: all of it is in the address

function readPlace() {
  place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!VIEWS.includes(place.view)) place.view = "transfers";
  if (!SORTS.includes(place.sort)) delete place.sort;
}

/** Names the place in the address. */
function namePlace(change) {
  const next = {...place, ...change};
  for (const key of Object.keys(next)) if (!next[key]) delete next[key];
  const hash = `#${new URLSearchParams(next)}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
  readPlace();
}

/** Other rows, or another order: begins at the top. */
function go(change) {
  namePlace(change);
  by("scroll").scrollTop = 0;
  drawFrame();
  look();
}

/** Another row of those that are there, or none. */
function chooseRow(own) {
  chosen = own ?? null;
  namePlace({row: own ? TABLES[place.view].key(own) : ""});
  if (status) draw();
}

// ---- asking

const token = () => sessionStorage.getItem("token") ?? "";

class Refused extends Error {}

async function ask(path, body) {
  const headers = {Authorization: `Bearer ${token()}`};
  // A replica that was stopped takes connections, and never answers.
  const signal = AbortSignal.timeout(body ? 2 * ANSWER_MS : ANSWER_MS);
  const answer = await fetch(path, body ? {method: "POST", headers, signal, body: JSON.stringify(body)} : {headers, signal});
  if (answer.status === 401) throw new Refused("this is no token of the service");
  if (answer.status === 403) throw new Refused("this token does not look: use viewer.token or operator.token");
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error ?? `status ${answer.status}`);
  return content;
}

function askToken(why) {
  by("refused").textContent = why ?? "";
  if (!by("ask").open) by("ask").showModal();
}

/** Rows of the table that are in sight, and some more. */
function inSight() {
  const first = Math.max(0, Math.floor(by("scroll").scrollTop / ROW_PX) - 10);
  return [first, Math.ceil(by("scroll").clientHeight / ROW_PX) + 20];
}

async function look() {
  if (asking) {
    askedAgain = true;
    return;
  }
  if (!token()) {
    askToken();
    return;
  }
  asking = true;
  try {
    do {
      askedAgain = false;
      await lookOnce();
    } while (askedAgain);
    failed = null;
  } catch (error) {
    if (error instanceof Refused) {
      sessionStorage.removeItem("token");
      askToken(error.message);
    } else {
      failed = `the service does not answer (${error.message}); what you see is old; it is asked again every second`;
    }
  }
  asking = false;
  draw();
}

async function lookOnce() {
  const words = place.view === "jobs" && place.q ? `&${new URLSearchParams({q: place.q})}` : "";
  const asked = [ask(`v1/status?jobs=${JOBS}${words}`), ask("v1/rates")];
  if (place.view === "transfers") {
    const [offset, most] = inSight();
    const query = new URLSearchParams({offset, most, sort: place.sort ?? "rate"});
    for (const [name, value] of [["q", place.q], ["cluster", place.cluster], ["job", place.job]]) {
      if (value) query.set(name, value);
    }
    if (place.up) query.set("ascending", "1");
    asked.push(ask(`v1/transfers?${query}`).then(found => ({...found, offset})));
  } else if (place.view === "events") {
    asked.push(ask("v1/history?most=1000"));
  }
  const [first, second, third] = await Promise.all(asked);
  [status, rates] = [first, second];
  if (place.view === "transfers" && third?.rows) page = third;
  if (place.view === "events" && Array.isArray(third)) happened = third;
}

async function change(asked, element) {
  if (element) element.disabled = true;
  try {
    await ask("v1/ask", asked);
  } catch (error) {
    alert(`not changed: ${error.message}`);
  }
  if (element) element.disabled = false;
  look();
}

// ---- the tables: of each view its columns; a cell is a text, or an element

const name = own => `${own.cluster}/${own.job}`;

function progress(own) {
  const part = own.asked_bytes ? own.served_bytes / own.asked_bytes : 0;
  const cell = make("span"), bar = make("span", null, "done"), fill = make("i");
  fill.style.width = `${100 * Math.min(1, part)}%`;
  bar.append(fill);
  cell.append(bar, ` ${(100 * part).toFixed(0)} %`);
  return cell;
}

function spark(own) {
  const curve = rates?.jobs.find(job => job.cluster === own.cluster && job.job === own.job)?.rates;
  if (!curve) return "";
  const most = Math.max(...curve, 1);
  const first = 90 - curve.length;
  const points = curve.map((value, index) => `${first + index},${20 - 19 * value / most}`).join(" ");
  const drawn = drawing("svg", {viewBox: "0 0 89 20", preserveAspectRatio: "none", role: "img"});
  drawn.append(drawing("polyline", {points, fill: "none", stroke: "var(--mark)", "vector-effect": "non-scaling-stroke"}));
  const title = drawing("title", {});
  title.textContent = `the last ${count(2 * curve.length, "second")}, at most ${rate(most)}`;
  drawn.append(title);
  return drawn;
}

function priority(own) {
  if (!status.may_change) return own.priority.toString();
  const field = make("input");
  Object.assign(field, {type: "text", inputMode: "decimal", value: own.priority, title: "Enter changes it, Escape does not"});
  field.setAttribute("aria-label", `priority of ${name(own)}`);
  field.style.width = "6rem";
  field.addEventListener("keydown", event => {
    if (event.key === "Enter") {
      const changed = Number(field.value);
      if (!(changed > 0)) alert(`${field.value}: a priority is a number above 0`);
      else change({ask: "change", cluster: own.cluster, job: own.job, change: {priority: changed}}, field);
    }
    if (event.key === "Escape") field.value = own.priority;
  });
  // What was typed and not entered is not there when somebody looks again.
  field.addEventListener("blur", () => { field.value = own.priority; });
  return field;
}

/** A choice that is made only once somebody has confirmed it: an arrow key changes a closed one at once. */
function menu(options, now, title, question, asked) {
  const choice = make("select");
  choice.append(...options.map(one => make("option", one)));
  choice.value = now;
  choice.title = title;
  choice.setAttribute("aria-label", title);
  choice.addEventListener("change", () => {
    const wanted = choice.value;
    if (confirm(question(wanted))) change(asked(wanted), choice);
    else choice.value = now;
  });
  return choice;
}

function transport(own) {
  const now = own.transport ?? "auto";
  if (!status.may_change) return now;
  return menu(TRANSPORTS, now, `transport that ${name(own)} demands`,
    wanted => `Have ${name(own)} use ${wanted} in place of ${now}?`,
    wanted => ({ask: "change", cluster: own.cluster, job: own.job, change: {transport: wanted === "auto" ? null : wanted}}));
}

function drained(own) {
  const is = status.drained.includes(own.host);
  const cell = make("span", is ? "drained " : "");
  if (status.may_change) {
    const button = make("button", is ? "use it again" : "drain");
    button.addEventListener("click", () => {
      const question = is ? `Let clusters use ${own.host} again?`
        : `Have all clusters leave ${own.host}? Their workers there hand over what they hold, and end.`;
      if (confirm(question)) {
        change({ask: is ? "undrain" : "drain", host: own.host}, button);
      }
    });
    cell.append(button);
  }
  return cell;
}

const TABLES = {
  transfers: {
    key: own => [own.cluster, own.job, own.from, own.to].join("\u001f"),
    columns: [
      ["job", "", "name", name], ["transfer", "", null, own => `${own.from} → ${own.to}`],
      ["pattern", "6.5rem", null, own => own.pattern],
      ["weight", "4.5rem", "weight", own => own.weight === null ? "" : own.weight.toFixed(3), "n"],
      ["flows", "3.5rem", null, own => own.flows.toString(), "n"],
      ["transport", "5.5rem", null, own => own.transport ?? ""],
      ["bytes", "6rem", "served", own => bytes(own.served_bytes), "n"],
      ["rate", "6.5rem", "rate", own => rate(own.bytes_per_sec), "n"],
      ["left", "5.5rem", "left", own => bytes(Math.max(0, own.asked_bytes - own.served_bytes)), "n"],
      ["progress", "8.5rem", null, progress], ["for", "4rem", "age", own => ago(own.age_secs), "n"],
      ["why", "", null, own => own.fallbacks.length ? `${own.reason}; ${own.fallbacks.join("; ")}` : own.reason],
    ],
    detail: own => [
      ["pattern", `${own.pattern}: ${own.evidence}`],
      ["transport", `${own.transport ?? "none yet"}: ${own.reason}`],
      ...own.negotiated.map(one => ["agreed with a peer", agreed(one)]),
      ...own.fallbacks.map(one => ["not as planned", one]),
      ["bytes", `${bytes(own.served_bytes)} of ${bytes(own.asked_bytes)} that were asked for, at ${rate(own.bytes_per_sec)}`],
      ["weight", own.weight === null ? "none: it does not count yet" : `${own.weight.toFixed(4)} of its hosts' bytes`],
    ],
  },
  jobs: {
    key: name,
    columns: [
      ["job", "", null, own => link(name(own), {view: "transfers", cluster: own.cluster, job: own.job})],
      ["priority", "8rem", null, priority, "n"], ["demand", "7rem", null, transport],
      ["weight", "6rem", null, own => own.weight === null ? "" : own.weight.toFixed(3), "n"],
      ["transfers", "6rem", null, own => own.transfers.toString(), "n"],
      ["rate", "8rem", null, own => own.bytes_per_sec ? rate(own.bytes_per_sec) : "", "n"],
      ["the last three minutes", "20rem", null, spark],
    ],
    detail: own => [["job", name(own)], ["came as number", own.arrival.toString()],
      ["weight", own.weight === null ? "none: nothing of it is active" : `${own.weight.toFixed(4)} of its hosts' bytes`]],
  },
  hosts: {
    key: own => own.host,
    columns: [
      ["host", "", null, own => own.host], ["clusters", "", null, own => own.clusters.join(", ")],
      ["flows at once", "10rem", null, own => own.budgets.join(", "), "n"], ["", "14rem", null, drained],
    ],
    detail: own => [["host", own.host], ["clusters", own.clusters.join(", ")]],
  },
  events: {
    key: own => String(own.number),
    columns: [["ago", "6rem", null, own => ago(own.ago_secs), "n"], ["what", "", null, inWords]],
    detail: own => [["what", inWords(own)]],
  },
};

function agreed(one) {
  const said = [one.transport, one.congestion_control, one.tls, one.memory,
    one.authenticated ? "both ends authenticated" : "", one.subflows ? count(one.subflows, "subflow") : "",
    one.rto_min_us ? `minimum RTO ${one.rto_min_us / 1000} ms` : ""];
  return said.filter(word => word).join(", ");
}

function inWords(own) {
  switch (own.what) {
    case "leader": return own.leader ? `${own.leader} leads` : "nobody leads";
    case "store": return own.problem ? `the store: ${own.problem}` : "the store answers again";
    case "cluster-joined": return `cluster ${own.cluster} joined with ${count(own.hosts, "host")}`;
    case "cluster-left": return `cluster ${own.cluster} left`;
    case "cluster-changed": return `cluster ${own.cluster} changed: ${count(own.hosts, "host")}`;
    case "job-arrived": return `job ${name(own)} arrived`;
    case "job-ended": return `job ${name(own)} ended`;
    case "job-changed": {
      const {priority, transport} = own.change;
      const said = [priority ? `priority ${priority}` : "", transport === undefined ? "" : `transport ${transport ?? "auto"}`];
      return `an operator changed ${name(own)}: ${said.filter(word => word).join(", ")}`;
    }
    case "policy": return `an operator chose the policy ${own.policy}`;
    case "drained": return `an operator drained ${own.host}`;
    case "undrained": return `an operator let clusters use ${own.host} again`;
    default: return JSON.stringify(own);
  }
}

function link(text, to) {
  const made = make("a", text);
  made.href = `#${new URLSearchParams(to)}`;
  return made;
}

/** Rows of the view, where the first of them stands, and how many there are. */
function rowsNow() {
  const words = (place.q ?? "").toLowerCase().split(/\s+/).filter(word => word);
  const has = text => words.every(word => text.toLowerCase().includes(word));
  const cut = all => {
    const [first, most] = inSight();
    return [all.slice(first, first + most), Math.min(first, all.length), all.length];
  };
  switch (place.view) {
    case "transfers": return page ? [page.rows, Math.min(page.offset, page.found), page.found] : [[], 0, 0];
    // In the order of names: rows that people type into stay where they are.
    case "jobs": return cut(status.jobs.filter(own => has(name(own))).sort((a, b) => name(a) < name(b) ? -1 : 1));
    case "hosts": {
      const hosts = new Map();
      for (const cluster of status.clusters) {
        for (const host of cluster.hosts) {
          if (!hosts.has(host)) hosts.set(host, {host, clusters: [], budgets: []});
          hosts.get(host).clusters.push(cluster.cluster);
          if (cluster.flows_per_host !== null) hosts.get(host).budgets.push(String(cluster.flows_per_host));
        }
      }
      for (const host of status.drained) if (!hosts.has(host)) hosts.set(host, {host, clusters: [], budgets: []});
      return cut([...hosts.values()].filter(own => has(`${own.host} ${own.clusters.join(" ")}`)));
    }
    default: return cut(happened.filter(own => has(inWords(own))));
  }
}

// ---- drawing

/** Writes a text where it differs: what is said again is read out again. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What depends on the address alone. */
function drawFrame() {
  for (const one of document.querySelectorAll("nav a")) {
    if (one.dataset.view === place.view) one.setAttribute("aria-current", "page"); else one.removeAttribute("aria-current");
  }
  if (document.activeElement !== by("search")) by("search").value = place.q ?? "";
  const filters = place.view === "transfers" ? ["cluster", "job"].filter(key => place[key]) : [];
  by("filters").replaceChildren(...filters.map(key => {
    const button = make("button", `${key} ${place[key]} ×`);
    button.title = "do not look for it alone";
    button.addEventListener("click", () => go({[key]: ""}));
    return button;
  }));
  if (by("head").dataset.view !== place.view) {
    by("head").dataset.view = place.view;
    by("head").replaceChildren(...TABLES[place.view].columns.map(([title, width, sort, , kind]) => {
      const cell = make("th", sort ? null : title, kind);
      cell.scope = "col";
      if (width) cell.style.width = width;
      if (sort) {
        const button = make("button", title);
        Object.assign(button.dataset, {sort, title});
        button.addEventListener("click", () => go({sort, up: (place.sort ?? "rate") === sort && !place.up ? "1" : ""}));
        cell.append(button);
      }
      return cell;
    }));
    by("rows").replaceChildren();
    chosen = null;
  }
  for (const button of by("head").querySelectorAll("button")) {
    const now = (place.sort ?? "rate") === button.dataset.sort;
    say(button, now ? `${button.dataset.title} ${place.up ? "↑" : "↓"}` : button.dataset.title);
    button.parentElement.setAttribute("aria-sort", now ? (place.up ? "ascending" : "descending") : "none");
  }
}

function band(rows) {
  const line = make("tr", null, "band"), cell = make("td");
  cell.colSpan = TABLES[place.view].columns.length;
  cell.style.height = `${rows * ROW_PX}px`;
  line.append(cell);
  line.setAttribute("aria-hidden", "true");
  return line;
}

/** Puts what a row has to show into the line for it; what is there already stays. */
function fill(line, own, columns) {
  columns.forEach(([, , , show, kind], index) => {
    let cell = line.children[index];
    if (!cell) {
      cell = make("td", null, kind);
      line.append(cell);
    }
    const shown = show(own);
    if (typeof shown === "string") {
      if (cell.firstElementChild || cell.textContent !== shown) cell.textContent = shown;
      if (cell.title !== shown) cell.title = shown;
    } else if (!cell.contains(document.activeElement)) {
      // Somebody types there.
      cell.replaceChildren(shown);
    }
  });
}

function drawRows() {
  const {columns, key} = TABLES[place.view];
  const [rows, first, found] = rowsNow();
  list = rows;
  const body = by("rows");
  if (!body.children.length) body.append(band(0), band(0));
  // A line stays that of its row wherever that goes: somebody may be typing in it.
  const before = new Map([...body.children].slice(1, -1).map(line => [line.dataset.row, line]));
  rows.forEach((own, index) => {
    const is = key(own);
    const line = before.get(is) ?? make("tr");
    before.delete(is);
    line.dataset.row = is;
    line.id = `row-${first + index}`;
    line.setAttribute("aria-selected", String(place.row === is));
    line.setAttribute("aria-rowindex", first + index + 2);
    fill(line, own, columns);
    if (body.children[index + 1] !== line) body.insertBefore(line, body.children[index + 1]);
  });
  for (const line of before.values()) line.remove();
  body.firstChild.firstChild.style.height = `${first * ROW_PX}px`;
  body.lastChild.firstChild.style.height = `${Math.max(0, found - first - rows.length) * ROW_PX}px`;
  by("scroll").setAttribute("aria-rowcount", found + 1);
  const at = rows.findIndex(own => key(own) === place.row);
  if (at < 0) by("scroll").removeAttribute("aria-activedescendant");
  else by("scroll").setAttribute("aria-activedescendant", `row-${first + at}`);
  const active = page && place.view === "transfers" ? ` of ${page.active.toLocaleString("en")}, ${rate(page.bytes_per_sec)}` : "";
  const hidden = place.view === "jobs" && status.jobs_hidden ? ` and ${status.jobs_hidden} that move less: search for them` : "";
  say(by("found"), `${found.toLocaleString("en")}${active}${hidden}`);
}

function drawDetail() {
  const {key, detail} = TABLES[place.view];
  const now = place.row && list.find(one => key(one) === place.row);
  if (now) chosen = now;
  const panel = by("detail");
  panel.hidden = !place.row || !chosen;
  if (panel.hidden) return;
  const own = chosen;
  const title = place.view === "transfers" ? `${name(own)}: ${own.from} → ${own.to}` : detail(own)[0][1];
  const shown = JSON.stringify([title, detail(own), Boolean(now)]);
  if (panel.dataset.shown === shown) return;
  panel.dataset.shown = shown;
  if (!panel.firstChild) panel.append(make("h2"), make("dl"), make("p"));
  const [heading, facts, more] = panel.children;
  say(heading, now ? title : `${title} (not in sight, or over: as it was last)`);
  facts.replaceChildren(...detail(own).flatMap(([term, meaning]) => [make("dt", term), make("dd", meaning)]));
  const to = place.view === "transfers" ? {view: "transfers", cluster: own.cluster, job: own.job} : null;
  if (!to) more.replaceChildren();
  else if (!more.firstChild) more.append(link("all of this job", to));
  else more.firstChild.href = `#${new URLSearchParams(to)}`;
}

function drawCurve() {
  const shown = rates?.jobs.slice(0, COLOURS.length - 1) ?? [];
  const all = rates?.all ?? [];
  const most = Math.max(...all, 1);
  const sums = all.map(() => 0);
  const first = 90 - all.length;
  const parts = [...shown.map(own => own.rates), all].map((curve, index) => {
    const bottom = [...sums];
    const offset = all.length - curve.length;
    if (index === shown.length) all.forEach((value, at) => { sums[at] = value; });
    else curve.forEach((value, at) => { sums[offset + at] += value; });
    const y = value => (98 - 96 * value / most).toFixed(1);
    const top = sums.map((value, at) => `${first + at},${y(value)}`);
    const back = bottom.map((value, at) => `${first + at},${y(value)}`).reverse();
    return drawing("polygon", {points: [...top, ...back].join(" "), fill: COLOURS[index]});
  });
  by("area").replaceChildren(...parts);
  const lines = shown.map((own, index) => [name(own), own.rates.at(-1), COLOURS[index],
    {view: "transfers", cluster: own.cluster, job: own.job}]);
  lines.unshift(["all jobs, the last three minutes", all.at(-1) ?? 0, "none", {view: "jobs"}]);
  by("area").setAttribute("aria-label", `all jobs: ${rate(all.at(-1) ?? 0)} now, at most ${rate(most)} in three minutes`);
  const legend = by("legend");
  while (legend.children.length > lines.length) legend.lastChild.remove();
  lines.forEach(([text, now, colour, to], index) => {
    if (!legend.children[index]) {
      const made = make("li"), label = make("span", null, "name");
      label.append(link(text, to));
      made.append(make("i"), label, make("span"));
      legend.append(made);
    }
    const [mark, label, number] = legend.children[index].children;
    mark.style.background = colour;
    say(label.firstChild, text);
    const href = `#${new URLSearchParams(to)}`;
    if (label.firstChild.getAttribute("href") !== href) label.firstChild.href = href;
    say(number, rate(now));
  });
}

function drawPolicy() {
  const cell = by("policy");
  if (!status.may_change) cell.replaceChildren();
  if (!status.may_change || cell.contains(document.activeElement)) return;
  const names = status.policies.includes(status.policy) ? status.policies : [status.policy, ...status.policies];
  const now = status.policy;
  cell.replaceChildren("policy ", menu(names, now, "how the jobs of all clusters share hosts",
    wanted => `Have all clusters share their hosts by ${wanted} in place of ${now}?`, wanted => ({ask: "policy", policy: wanted})));
}

function drawLine() {
  const hosts = new Set(status.clusters.flatMap(cluster => cluster.hosts)).size;
  const role = status.role === "leader" ? `leader, epoch ${status.epoch}` : "this replica follows";
  say(by("line"), `policy ${status.policy}; ${count(status.clusters.length, "cluster")} on ${count(hosts, "host")}, ` +
    `${count(status.jobs_there, "job")}; ${role}` + (status.may_change ? "; you may change things" : ""));
  document.title = status.problems.length || failed ? "(!) Mission Control" : "Mission Control";
  const texts = [...status.problems, ...(failed ? [failed] : [])];
  const shown = JSON.stringify([texts, status.role, status.leader]);
  if (by("problems").dataset.shown === shown) return;
  by("problems").dataset.shown = shown;
  const problems = texts.map(text => make("li", text));
  if (status.role !== "leader" && status.leader && /^https?:\/\//.test(status.leader)) {
    const line = make("li", "this replica does not lead, so it knows of no transfers; the leader's console is at ");
    const to = make("a", status.leader);
    to.href = `${status.leader}/${location.hash}`;
    line.append(to);
    problems.push(line);
  }
  by("problems").replaceChildren(...problems);
}

function draw() {
  if (!status) {
    if (failed) by("line").textContent = failed;
    return;
  }
  drawLine();
  drawPolicy();
  drawCurve();
  drawRows();
  drawDetail();
}

// ---- people

function choose(step) {
  const {key} = TABLES[place.view];
  const at = list.findIndex(own => key(own) === place.row);
  // Without one that is in sight the first that is.
  const above = Number(by("rows").children[1]?.getAttribute("aria-rowindex") ?? 2) - 2;
  const first = Math.max(0, Math.ceil(by("scroll").scrollTop / ROW_PX) - above);
  const next = list[Math.min(list.length - 1, Math.max(0, at < 0 ? first : at + step))];
  if (!next) return;
  chooseRow(next);
  document.querySelector('tr[aria-selected="true"]')?.scrollIntoView({block: "nearest"});
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (["INPUT", "SELECT"].includes(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = event.key.length === 1 ? VIEWS["1234".indexOf(event.key)] : undefined;
  const does = {
    "/": () => by("search").focus(), "?": () => by("help").showModal(), t: theme, ArrowDown: () => choose(1),
    ArrowUp: () => choose(-1), j: () => choose(1), k: () => choose(-1), Escape: () => chooseRow(null),
  }[event.key] ?? (view ? () => { location.hash = `#view=${view}`; } : null);
  if (!does) return;
  event.preventDefault();
  does();
});
by("search").addEventListener("input", () => go({q: by("search").value, row: ""}));
by("rows").addEventListener("click", event => {
  const line = event.target.closest("tr[data-row]");
  if (line && !event.target.closest("a, button, input, select")) {
    const {key} = TABLES[place.view];
    chooseRow(line.dataset.row === place.row ? null : list.find(own => key(own) === line.dataset.row));
  }
});
let scrolled = 0;
by("scroll").addEventListener("scroll", () => {
  clearTimeout(scrolled);
  // Rows that are here already are drawn at once; others are asked for when the scrolling rests.
  if (place.view !== "transfers" && status) drawRows();
  scrolled = setTimeout(look, 50);
});
addEventListener("hashchange", () => {
  readPlace();
  by("scroll").scrollTop = 0;
  drawFrame();
  look();
});
by("ask").addEventListener("close", () => {
  const typed = by("token").value.trim();
  by("token").value = "";
  if (typed) sessionStorage.setItem("token", typed);
  look();
});
by("theme").addEventListener("click", theme);
by("keys").addEventListener("click", () => by("help").showModal());
by("leave").addEventListener("click", () => {
  sessionStorage.removeItem("token");
  [status, page, rates, happened, list] = [null, null, null, [], []];
  for (const id of ["rows", "legend", "area", "problems", "policy"]) by(id).replaceChildren();
  by("detail").hidden = true;
  say(by("line"), "nobody looks");
  askToken();
});
const theirs = localStorage.getItem("theme");
if (theirs) document.documentElement.dataset.theme = theirs;
readPlace();
drawFrame();
look();
setInterval(() => document.hidden || document.querySelector("dialog[open]") || look(), LOOK_MS);
