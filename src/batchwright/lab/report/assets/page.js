// The page: what is chosen, what follows from it, and a look now and then whether the lab has gone on.
const data = JSON.parse(document.getElementById("data").textContent);
const NUM_SLOTS = 6;
const NUM_CHARTS = 6;
const NUM_CHARTS_NARROW = 2;
const NARROW = 704; // below this, style.css has a phone's layout
const unfolded = new Set();
let turn = 0;
const SECONDS_BETWEEN_LOOKS = 3;
const SECONDS_TO_ANSWER = 60;
const state = { dataset: "", model: "", group: "", measure: "loss", x: "examples", y: "loss", cost: "updates", on: null, run: "" };
const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];

// Names of the strategies drawn in colour, each at the place of its colour; "" is a free one. The baseline is black.
function chosen() {
  const on = [...(state.on ?? JSON.parse(document.body.dataset.leaders))];
  while (on.length < NUM_SLOTS) on.push("");
  return on;
}

// A group that is shown alone keeps its colours, and its grey members take those of strategies that are not shown.
function coloured() {
  if (!state.group) return chosen();
  const members = data.strategies.filter(({ name, group }) => group === state.group && name !== data.baseline).map(({ name }) => name);
  const grey = state.on ? [] : members.filter((name) => !chosen().includes(name));
  return chosen().map((name) => (members.includes(name) ? name : grey.shift() ?? ""));
}

function slotOf(strategy) {
  const { name } = data.strategies[strategy];
  if (name === data.baseline) return "base";
  const place = coloured().indexOf(name);
  return place < 0 ? "rest" : `s${place}`;
}

const rankOf = (slot) => ({ rest: 0, base: 2 })[slot] ?? 1;

function isShown(strategy) {
  const { name, group } = data.strategies[strategy];
  return !state.group || group === state.group || name === data.baseline;
}

const shownCells = () => data.cells
  .map((cell, index) => ({ ...cell, index }))
  .filter((cell) => (!state.dataset || cell.dataset === state.dataset) && (!state.model || cell.model === state.model));

// Many charts make a long way to the end of the page: the first ones, and a button for the others.
function drawGrid(place, draw) {
  const found = shownCells();
  const cells = unfolded.has(place.id) ? found : found.slice(0, innerWidth < NARROW ? NUM_CHARTS_NARROW : NUM_CHARTS);
  place.classList.toggle("single", cells.length === 1);
  const figures = cells.map((cell) => tag("figure", {}, tag("figcaption", {}, tag("b", {}, cell.dataset), ` ${cell.model}`)));
  place.replaceChildren(...(figures.length ? figures : [tag("p", { class: "note" }, "No data set has this model: choose another.")]));
  const widths = figures.map((figure) => Math.max(260, figure.clientWidth));
  figures.forEach((figure, index) => figure.append(draw(cells[index].index, widths[index])));
  if (cells.length < found.length) {
    const others = found.length - cells.length;
    const button = tag("button", { type: "button", class: "more" }, `Show ${others > 1 ? `the other ${others} charts` : "one more chart"}`);
    button.addEventListener("click", () => unfold(place.id));
    place.append(button);
  }
}

function unfold(...names) {
  for (const name of names) unfolded.add(name);
  refresh();
}

function drawChips() {
  const names = data.strategies.filter(({ name }, index) => name !== data.baseline && isShown(index)).map(({ name }) => name);
  const chips = names.map((name) => {
    const place = coloured().indexOf(name);
    const chip = tag("button", { type: "button", "aria-pressed": place >= 0 }, swatch(place < 0 ? "rest" : `s${place}`), name);
    chip.addEventListener("click", () => toggle(name));
    return chip;
  });
  one("#chips").replaceChildren(tag("span", {}, swatch("base"), data.baseline), ...chips);
}

// A strategy gives its colour back, or takes a free one; the others keep theirs. If none is free, the colours are taken
// over one after the other.
function toggle(name) {
  const on = coloured().includes(name) ? coloured() : chosen();
  if (on.includes(name)) on[on.indexOf(name)] = "";
  else if (on.includes("")) on[on.indexOf("")] = name;
  else on[turn++ % NUM_SLOTS] = name;
  state.on = on;
  refresh();
}

function filterTables() {
  for (const part of all("[data-measure]")) part.hidden = part.dataset.measure !== state.measure;
  for (const cell of all(".matrix [data-dataset]")) {
    cell.hidden = Boolean((state.dataset && cell.dataset.dataset !== state.dataset) || (state.model && cell.dataset.model !== state.model));
  }
  for (const cell of all(".matrix .pooled")) cell.hidden = Boolean(state.dataset || state.model);
  for (const row of all(".matrix tbody tr")) row.hidden = Boolean(state.group && row.dataset.group !== state.group);
}

function runName(run) {
  const cell = data.cells[run.cell];
  return `${cell.dataset} · ${cell.model} · ${data.strategies[run.strategy].name} · seed ${run.seed}`;
}

// Every change of a run's batch size, in words.
function drawDecisions() {
  const cells = new Set(shownCells().map((cell) => cell.index));
  const runs = data.runs.filter((run) => cells.has(run.cell) && isShown(run.strategy) && run.status === "ok");
  runs.sort((a, b) => a.cell - b.cell || a.strategy - b.strategy || a.seed - b.seed);
  const choice = one("#run");
  choice.replaceChildren(...runs.map((run) => tag("option", { value: runName(run) }, runName(run))));
  const first = runs.find((run) => runName(run) === state.run) ?? runs.find((run) => slotOf(run.strategy) === "s0") ?? runs[0];
  if (!first) {
    one("#decisions").replaceChildren(tag("p", {}, "No finished run here."));
    return;
  }
  choice.value = runName(first);
  one("#decisions").replaceChildren(...describeRun(first));
}

function describeRun(run) {
  if (!run.made) return [tag("p", {}, "The batch size never changed.")];
  const left = run.made - run.decisions.length;
  const sizes = run.decisions.flatMap(([, , , before, after]) => [before, after]).filter(isNumber);
  const text = `${run.made.toLocaleString("en")} ${run.made === 1 ? "change" : "changes"} of the batch size, between ${show(Math.min(...sizes))} and ${show(Math.max(...sizes))}.`;
  const rows = run.decisions.map(([examples, step, epoch, before, after, reason]) => tag("tr", {},
    tag("td", { class: "number" }, show(examples)), tag("td", { class: "number" }, show(step)), tag("td", { class: "number" }, show(epoch)),
    tag("td", { class: "change" }, `${show(before)} → ${show(after)}`), tag("td", {}, data.reasons[reason])));
  const head = ["examples", "updates", "epoch", "batch size", "why"].map((name, place) => tag("th", { scope: "col", class: place < 3 ? "number" : null }, name));
  const table = tag("table", {}, tag("caption", {}, tag("span", {}, `Decisions of ${runName(run)}`)), tag("thead", {}, tag("tr", {}, ...head)), tag("tbody", {}, ...rows));
  const note = left ? [tag("p", { class: "note" }, `${left.toLocaleString("en")} decisions in the middle are left out; runs.jsonl has all.`)] : [];
  return [tag("p", {}, text), ...note, tag("div", { class: "wide tall", tabindex: 0, role: "region", "aria-label": "Decisions" }, table)];
}

function refresh() {
  tip.hide();
  filterTables();
  drawChips();
  drawGrid(one("#curves-grid"), drawCurves);
  drawGrid(one("#pareto-grid"), drawPareto);
  drawDecisions();
  remember();
  document.documentElement.dataset.ready = "yes";
}

// What was chosen lives in the address, so that a reload, or a friend, sees the same.
function remember() {
  const kept = Object.entries(state).filter(([, value]) => value).map(([name, value]) => [name, Array.isArray(value) ? value.join(",") : value]);
  history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
}

function recall() {
  const names = new Set(data.strategies.map(({ name }) => name));
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name === "on") state.on = value.split(",").slice(0, NUM_SLOTS).map((other) => (names.has(other) ? other : ""));
    else if (name in state) state[name] = value;
  }
  for (const choice of all("select[data-state]")) {
    const { state: name } = choice.dataset;
    if (![...choice.options].some((option) => option.value === state[name])) state[name] = choice.options[0].value;
  }
  for (const first of all(".switch label:first-of-type input")) {
    const values = all(`input[name=${first.name}]`).map((button) => button.value);
    if (!values.includes(state[first.name])) state[first.name] = first.value;
  }
  showChoices();
}

function showChoices() {
  for (const choice of all("select[data-state]")) choice.value = state[choice.dataset.state];
  for (const button of all("input[data-state]")) button.checked = state[button.dataset.state] === button.value;
}

function reset() {
  Object.assign(state, { dataset: "", model: "", group: "", on: null });
  showChoices();
  refresh();
}

function showProgress({ text, done, expected }) {
  const bar = one("#live progress");
  one("#live p").textContent = text;
  one("#live").hidden = !text;
  bar.hidden = !expected;
  if (expected) Object.assign(bar, { max: expected, value: done });
}

// Served by `batchwright lab show`, the page asks whether there are new runs and loads itself again.
async function look() {
  try {
    const options = { cache: "no-store", signal: AbortSignal.timeout(1000 * SECONDS_TO_ANSWER) };
    const found = await (await fetch(document.body.dataset.live, options)).json();
    showProgress(found);
    if (found.stamp !== document.body.dataset.stamp) {
      sessionStorage.setItem("scroll", scrollY);
      location.reload();
    }
  } catch {
    showProgress({ text: "No longer served: what you see is the last state." });
  }
  setTimeout(look, 1000 * SECONDS_BETWEEN_LOOKS);
}

// On a phone, long parts are folded under their headings until one is wanted.
function foldParts() {
  for (const part of all(".topic, #decisions-of, #failed, #about")) {
    const heading = part.querySelector("h2, h3");
    const button = tag("button", { type: "button" }, ...heading.childNodes);
    button.addEventListener("click", () => foldPart(part, !part.classList.contains("folded")));
    heading.replaceChildren(button);
    foldPart(part, true);
  }
  for (const link of all("nav a")) {
    link.addEventListener("click", () => {
      const part = one(link.getAttribute("href"));
      if (part.classList.contains("folded")) foldPart(part, false);
    });
  }
}

function foldPart(part, isFolded) {
  part.classList.toggle("folded", isFolded);
  part.querySelector("h2 > button, h3 > button").setAttribute("aria-expanded", !isFolded);
}

function start() {
  recall();
  if (innerWidth < NARROW) foldParts();
  for (const choice of all("[data-state]")) {
    choice.addEventListener("change", () => {
      state[choice.dataset.state] = choice.value;
      refresh();
    });
  }
  one("#run").addEventListener("change", (event) => {
    state.run = event.target.value;
    drawDecisions();
    remember();
  });
  one("#reset").addEventListener("click", reset);
  addEventListener("beforeprint", () => unfold("curves-grid", "pareto-grid"));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) refresh();
    width = innerWidth;
  });
  refresh();
  if (document.body.dataset.live) {
    scrollTo(0, Number(sessionStorage.getItem("scroll") ?? 0));
    sessionStorage.removeItem("scroll");
    look();
  }
}

start();
