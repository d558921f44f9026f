"use strict";
const PERIOD_MS = 500, SPAN_SECONDS = 60, SMOOTH_SECONDS = 2;
const WIDTH = 440, HEIGHT = 170, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20;
const samples = [];
const find = (id) => document.getElementById(id);
const node = (name, attributes, ...inside) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
};
const colour = (index, count) => `s${count === 1 ? 2 : index}`;

// The figures of one moment: differences of counts over the last two seconds.
function pointOf(now, before, index) {
  const a = now.arms[index], b = before.arms[index], seconds = now.at - before.at;
  const inTime = a.answered - a.late - (b.answered - b.late);
  const missed = a.late - b.late + a.shed - b.shed;
  const ended = inTime + missed + a.failed - b.failed;
  const batches = a.batches - b.batches;
  const real = a.tokens[0] - b.tokens[0], padded = a.tokens[1] - b.tokens[1];
  return {
    asked: (a.asked - b.asked) / seconds,
    inTime: inTime / seconds,
    missed: ended ? 100 * missed / ended : null,
    p50: a.p50_ms, p99: a.p99_ms,
    items: batches ? (a.items - b.items) / batches : null,
    padding: padded ? 100 * (1 - real / padded) : null,
    waiting: a.waiting,
  };
}

const CHARTS = [
  { title: "Answered in time", unit: "per second; dotted: asked for", keys: ["inTime"], asked: true, least: 10 },
  { title: "Latency", unit: "ms; thick: p99, thin: p50, dashed: the deadline", keys: ["p99", "p50"], log: true, limit: true },
  { title: "Missed", unit: "% of the requests that ended", keys: ["missed"], least: 10, most: 100 },
  { title: "Requests per batch", unit: "mean", keys: ["items"], least: 4 },
  { title: "Padding", unit: "% of padded tokens", keys: ["padding"], least: 20, most: 100 },
  { title: "Waiting", unit: "requests in the queue", keys: ["waiting"], least: 10 },
];

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

function scaleOf(chart, points, deadline) {
  const values = points.flat().flatMap((point) => [...chart.keys, ...(chart.asked ? ["asked"] : [])].map((key) => point[key]));
  const most = Math.max(chart.least || 1, ...values.filter((value) => value !== null && value !== undefined));
  const height = HEIGHT - TOP - BOTTOM;
  if (!chart.log) {
    const top = Math.min(chart.most || Infinity, niceTop(most));
    return { y: (value) => TOP + height * (1 - Math.min(value, top) / top), ticks: [0, top / 2, top] };
  }
  const exponent = Math.max(2, Math.ceil(Math.log10(Math.max(most, deadline || 1))));
  const ticks = Array.from({ length: exponent + 1 }, (_, index) => 10 ** index);
  return { y: (value) => TOP + height * (1 - Math.log10(Math.max(1, value)) / exponent), ticks };
}

function pathOf(times, values, x, y) {
  let path = "", pen = false;
  values.forEach((value, index) => {
    if (value === null || value === undefined) { pen = false; return; }
    path += `${pen ? "L" : "M"}${x(times[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return path;
}

// One shape per policy, so that they differ not only in colour.
function dot(index, count, x, y) {
  const cls = `dot ${colour(index, count)}`;
  if (count === 1 || index === 2) return node("circle", { class: cls, cx: x, cy: y, r: 4.5 });
  if (index === 1) return node("rect", { class: cls, x: x - 4, y: y - 4, width: 8, height: 8 });
  return node("path", { class: cls, d: `M${x} ${y - 5.5}L${x + 5.5} ${y + 4}L${x - 5.5} ${y + 4}Z` });
}

function draw(chart, times, series, deadline, last) {
  const svg = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title}, ${chart.unit}` });
  const { y, ticks } = scaleOf(chart, series, deadline);
  const x = (time) => WIDTH - RIGHT - (WIDTH - LEFT - RIGHT) * (last - time) / SPAN_SECONDS;
  for (const tick of ticks) {
    svg.append(node("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    svg.append(node("text", { class: "end", x: LEFT - 8, y: y(tick) + 4 }, tick.toLocaleString("en")));
  }
  svg.append(node("text", { x: LEFT, y: HEIGHT - 3 }, "a minute ago"));
  svg.append(node("text", { class: "end", x: WIDTH - RIGHT, y: HEIGHT - 3 }, "now"));
  if (chart.limit && deadline) svg.append(node("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: y(deadline), y2: y(deadline) }));
  series.forEach((points, index) => {
    chart.keys.forEach((key, rank) => {
      const values = points.map((point) => point[key]);
      const cls = `line ${colour(index, series.length)}${rank ? " faint" : ""}`;
      svg.append(node("path", { class: cls, d: pathOf(times, values, x, y) }));
      const value = values[values.length - 1];
      if (!rank && value !== null && value !== undefined) svg.append(dot(index, series.length, x(last), y(value)));
    });
  });
  if (chart.asked) svg.append(node("path", { class: "asked", d: pathOf(times, series[0].map((point) => point.asked), x, y) }));
  return svg;
}

const number = (value, digits, unit) => (value === null || value === undefined ? "–" : value.toFixed(digits) + unit);

function row(name, point, index, count) {
  const line = document.createElement("tr"), head = document.createElement("td"), mark = node("svg", { viewBox: "0 0 22 14", "aria-hidden": "true" });
  mark.append(node("line", { class: `line ${colour(index, count)}`, x1: 1, x2: 21, y1: 7, y2: 7 }), dot(index, count, 11, 7));
  head.append(mark, name || "this server");
  line.append(head);
  const cells = [
    ["asked for", number(point.asked, 0, "/s")], ["in time", number(point.inTime, 0, "/s")], ["missed", number(point.missed, 1, " %")],
    ["p50", number(point.p50, 0, " ms")], ["p99", number(point.p99, 0, " ms")], ["per batch", number(point.items, 1, "")],
    ["padding", number(point.padding, 0, " %")], ["waiting", String(point.waiting)],
  ];
  for (const [title, text] of cells) {
    const cell = document.createElement("td");
    cell.dataset.name = title;
    cell.textContent = text;
    if (title === "missed" && point.missed >= 5) cell.className = "bad";
    line.append(cell);
  }
  return line;
}

function show() {
  const latest = samples[samples.length - 1], count = latest.arms.length;
  const times = [], series = latest.arms.map(() => []);
  samples.forEach((sample, place) => {
    const before = samples.slice(0, place).find((other) => sample.at - other.at <= SMOOTH_SECONDS + 0.25);
    if (!before) return;
    times.push(sample.at);
    series.forEach((points, index) => points.push(pointOf(sample, before, index)));
  });
  if (!times.length) return;
  find("now").replaceChildren(...latest.arms.map((arm, index) => row(arm.name, series[index][times.length - 1], index, count)));
  CHARTS.forEach((chart, place) => {
    find("charts").children[place].querySelector("svg").replaceWith(draw(chart, times, series, latest.deadline_ms, latest.at));
  });
  document.documentElement.dataset.ready = "yes";
}

function introduce(latest) {
  const { load, deadline_ms: deadline } = latest;
  const due = deadline ? `A request is due within ${Math.round(deadline)} ms.` : "Requests have no deadline.";
  find("about").textContent = load
    ? `Each policy gets the same requests at the same random moments and batches them for a small encoder (NumPy, on this machine's processor), at most ${load.max_items} per batch. ${due} Texts differ in length. The load pauses while nobody looks. All three share the processor, so a policy that is overloaded slows the others too.`
    : due;
  if (!load) return;
  find("title").textContent = "One encoder, one load, three policies";
  find("load").hidden = false;
  const slider = find("rate");
  slider.max = load.max_rate;
  slider.value = load.rate;
  find("rate-now").textContent = slider.value;
  slider.addEventListener("input", () => { find("rate-now").textContent = slider.value; });
  slider.addEventListener("change", () => {
    fetch("load", { method: "POST", headers: { "Content-Type": "application/json" }, body: slider.value }).catch(() => {});
  });
}

function addCharts() {
  for (const chart of CHARTS) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), title = document.createElement("b");
    title.textContent = chart.title;
    caption.dataset.key = chart.keys[0];
    caption.append(title, chart.unit);
    figure.append(caption, node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}` }));
    find("charts").append(figure);
  }
}

async function look() {
  try {
    const response = await fetch("live");
    if (!response.ok) throw new Error(String(response.status));
    const sample = await response.json();
    sample.at = performance.now() / 1000;
    // Counts that fall belong to a server that was restarted.
    const last = samples[samples.length - 1];
    if (last && sample.arms.some((arm, index) => arm.asked < last.arms[index].asked)) samples.length = 0;
    if (!find("about").textContent) introduce(sample);
    samples.push(sample);
    while (sample.at - samples[0].at > SPAN_SECONDS) samples.shift();
    find("state").textContent = "";
    show();
  } catch {
    find("state").textContent = "The server does not answer; trying again.";
  }
}

async function keepLooking() {
  if (!document.hidden) await look();
  setTimeout(keepLooking, PERIOD_MS);
}

addCharts();
keepLooking();
