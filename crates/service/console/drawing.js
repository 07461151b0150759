"use strict";
// Renders the visible rows, and reuses elements that exist.

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
    button.title = "remove this filter";
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
      // The user is typing there.
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
  // An element stays with its row when that moves: the user may be typing in it.
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
  const hidden = place.view === "jobs" && status.jobs_hidden ? ` and ${status.jobs_hidden} with lower rates: search for them` : "";
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
  say(heading, now ? title : `${title} (not listed, or over: last known state)`);
  facts.replaceChildren(...detail(own).flatMap(([term, meaning]) => [make("dt", term), make("dd", meaning)]));
  const to = place.view === "transfers" ? {view: "transfers", cluster: own.cluster, job: own.job} : null;
  if (!to) more.replaceChildren();
  else if (!more.firstChild) more.append(link("all transfers of this job", to));
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
  const role = status.role === "leader" ? `leader, epoch ${status.epoch}` : "this replica does not lead";
  say(by("line"), `policy ${status.policy}; ${count(status.clusters.length, "cluster")} on ${count(hosts, "host")}, ` +
    `${count(status.jobs_there, "job")}; ${role}` + (status.may_change ? "; you may change things" : ""));
  document.title = status.problems.length || failed ? "(!) Mission Control" : "Mission Control";
  const texts = [...status.problems, ...(failed ? [failed] : [])];
  const shown = JSON.stringify([texts, status.role, status.leader]);
  if (by("problems").dataset.shown === shown) return;
  by("problems").dataset.shown = shown;
  const problems = texts.map(text => make("li", text));
  if (status.role !== "leader" && status.leader && /^https?:\/\//.test(status.leader)) {
    const line = make("li", "this replica does not lead, so it has no transfers; the leader's console is at ");
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
