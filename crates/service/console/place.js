"use strict";
// The state of the view: all of it is in the address, so that a link shows the same to others.

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
