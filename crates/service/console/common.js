"use strict";
// Shared by all scripts of the console: the last answers, and helpers that make texts and elements.
// No text of a job is ever parsed as markup: all of it goes through textContent.

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

// The service sends null for numbers that do not exist.
const rate = count => `${bytes(count ?? 0)}/s`;
const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function ago(seconds) {
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  return seconds < 6000 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
