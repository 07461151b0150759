"use strict";
// The console's requests to the replica: status once a second, and changes.

const token = () => sessionStorage.getItem("token") ?? "";

class Refused extends Error {}

async function ask(path, body) {
  const headers = {Authorization: `Bearer ${token()}`};
  // A stopped replica accepts connections, and never answers.
  const signal = AbortSignal.timeout(body ? 2 * ANSWER_MS : ANSWER_MS);
  const answer = await fetch(path, body ? {method: "POST", headers, signal, body: JSON.stringify(body)} : {headers, signal});
  if (answer.status === 401) throw new Refused("this is not a token of the service");
  if (answer.status === 403) throw new Refused("this token cannot read: use viewer.token or operator.token");
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
      failed = `the service does not answer (${error.message}); the data below is old; retrying every second`;
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
