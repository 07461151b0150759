"use strict";
// Each view's columns, rows, and details of one row. A cell is a text, or an element.

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
  // Discard text that was typed but not entered.
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
      ...own.negotiated.map(one => ["negotiated", agreed(one)]),
      ...own.fallbacks.map(one => ["not as planned", one]),
      ["bytes", `${bytes(own.served_bytes)} of ${bytes(own.asked_bytes)} requested, at ${rate(own.bytes_per_sec)}`],
      ["weight", own.weight === null ? "none: its job is not stored yet" : `${own.weight.toFixed(4)} of its hosts' bytes`],
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
    detail: own => [["job", name(own)], ["order of arrival", own.arrival.toString()],
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
    columns: [["ago", "6rem", null, own => ago(own.ago_secs), "n"], ["what", "", null, own => own.text]],
    detail: own => [["what", own.text]],
  },
};

function agreed(one) {
  const said = [one.transport, one.congestion_control, one.tls, one.memory,
    one.authenticated ? "both ends authenticated" : "", one.subflows ? count(one.subflows, "subflow") : "",
    one.rto_min_us ? `minimum RTO ${one.rto_min_us / 1000} ms` : ""];
  return said.filter(word => word).join(", ");
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
    // In the order of names: rows that the user types into keep their places.
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
    default: return cut(happened.filter(own => has(own.text)));
  }
}
