"use strict";
// User input: keys, clicks, and the token. This is the last script, and starts the console.

function choose(step) {
  const {key} = TABLES[place.view];
  const at = list.findIndex(own => key(own) === place.row);
  // If the chosen row is not visible, choose the first visible one.
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
  // Loaded rows are rendered at once; others are requested when scrolling stops.
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
