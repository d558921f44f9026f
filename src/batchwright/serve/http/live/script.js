const PERIOD_MS = 500, SPAN_SECONDS = 60, SMOOTH_SECONDS = 2;
const NUM_COLOURS = 6;
const WIDTH = 440, HEIGHT = 170, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20;
const samples = [];
const find = (id) => document.getElementById(id);

// The figures of one moment: differences of counts over the last two seconds.
function pointOf(now, before, index) {
  const a = now.arms[index], b = before.arms[index], seconds = now.at - before.at;
  const inTime = a.answered - a.late - (b.answered - b.late);
  const missed = a.late - b.late + a.shed - b.shed;
  const failed = a.failed - b.failed;
  const ended = inTime + missed + failed;
  const batches = a.batches - b.batches;
  const real = a.tokens[0] - b.tokens[0], padded = a.tokens[1] - b.tokens[1];
  return {
    asked: (a.asked - b.asked) / seconds,
    inTime: inTime / seconds,
    missed: ended ? 100 * missed / ended : null,
    failed: failed / seconds,
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
  { title: "Failed", unit: "per second, by the error of their item", keys: ["failed"], least: 1 },
  { title: "Requests per batch", unit: "mean", keys: ["items"], least: 4 },
  { title: "Padding", unit: "% of padded tokens", keys: ["padding"], least: 20, most: 100 },
  { title: "Waiting", unit: "requests in the queue", keys: ["waiting"], least: 10 },
];

function scaleOf(chart, points, deadline) {
  const values = points.flat().flatMap((point) => [...chart.keys, ...(chart.asked ? ["asked"] : [])].map((key) => point[key]));
  const most = Math.max(chart.least || 1, ...values.filter(isNumber));
  const [bottom, top] = [HEIGHT - BOTTOM, TOP];
  if (!chart.log) {
    const high = Math.min(chart.most || Infinity, roundStep(most));
    const y = makeScale(0, high, bottom, top);
    return { y: (value) => y(Math.min(value, high)), ticks: [0, high / 2, high] };
  }
  const powers = Math.max(2, Math.ceil(Math.log10(Math.max(most, deadline || 1))));
  const y = makeScale(1, 10 ** powers, bottom, top, "log");
  return { y: (value) => y(Math.max(1, value)), ticks: Array.from({ length: powers + 1 }, (_, index) => 10 ** index) };
}

function draw(chart, times, series, deadline, last) {
  const drawing = canvas(WIDTH, HEIGHT, `${chart.title}, ${chart.unit}`);
  const { y, ticks } = scaleOf(chart, series, deadline);
  const x = makeScale(last - SPAN_SECONDS, last, LEFT, WIDTH - RIGHT);
  const across = (value, kind) => svg("line", { class: kind, x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) });
  const path = (points, key) => pathOf(points.map((point, place) => ({ x: times[place], y: point[key] })), x, y);
  for (const tick of ticks) drawing.append(across(tick, "grid"), label(tick.toLocaleString("en"), LEFT - 8, y(tick) + 4, "end"));
  drawing.append(label("a minute ago", LEFT, HEIGHT - 3), label("now", WIDTH - RIGHT, HEIGHT - 3, "end"));
  if (chart.limit && deadline) drawing.append(across(deadline, "limit"));
  const clip = `clip-${chart.keys[0]}`;
  const plane = svg("g", { "clip-path": `url(#${clip})` });
  drawing.append(clipTo(clip, { left: LEFT, right: WIDTH - RIGHT, top: TOP, bottom: HEIGHT - BOTTOM }), plane);
  series.forEach((points, index) => {
    chart.keys.forEach((key, rank) => {
      plane.append(svg("path", { class: `line s${index % NUM_COLOURS}${rank ? " thin" : ""}`, d: path(points, key) }));
      const value = points[points.length - 1][key];
      if (!rank && isNumber(value)) drawing.append(marker(index % NUM_COLOURS, x(last), y(value)));
    });
  });
  if (chart.asked) for (const points of series) plane.append(svg("path", { class: "dotted", d: path(points, "asked") }));
  return drawing;
}

const number = (value, digits, unit) => (isNumber(value) ? value.toFixed(digits) + unit : "–");

function row(name, point, index) {
  const cells = [
    ["asked for", number(point.asked, 0, "/s")], ["in time", number(point.inTime, 0, "/s")], ["missed", number(point.missed, 1, " %")],
    ["failed", number(point.failed, point.failed && point.failed < 10 ? 1 : 0, "/s")],
    ["p50", number(point.p50, 0, " ms")], ["p99", number(point.p99, 0, " ms")], ["per batch", number(point.items, 1, "")],
    ["padding", number(point.padding, 0, " %")], ["waiting", String(point.waiting)],
  ];
  const figures = cells.map(([title, text]) =>
    tag("td", { "data-name": title, class: (title === "missed" && point.missed >= 5) || (title === "failed" && point.failed > 0) ? "bad" : null }, text));
  return tag("tr", {}, tag("td", {}, swatch(`s${index % NUM_COLOURS}`, index % NUM_COLOURS), name || "this server"), ...figures);
}

// What the figures of the last two seconds say, in a sentence or two.
function inWords(names, points) {
  const asked = points.reduce((sum, point) => sum + point.asked, 0);
  if (!asked && points.every((point) => !point.waiting)) return "No request came in the last two seconds.";
  const listed = (places) => places.map((place) => names[place] || "this server").join(" and ");
  const places = points.map((_, place) => place);
  const missing = places.filter((place) => points[place].missed >= 0.05), failing = places.filter((place) => points[place].failed > 0);
  const rate = points.length === 1 ? `${asked.toFixed(0)} requests per second. ` : "";
  const missed = missing.map((place) => `${points[place].missed.toFixed(1)} % at ${listed([place])}`).join(", ");
  const late = missing.length ? `Missed, which is late, given up or refused: ${missed}.` : "Nothing was late or refused in the last two seconds.";
  const failed = failing.length ? ` The function raises errors for items at ${listed(failing)}.` : "";
  const padded = places.filter((place) => isNumber(points[place].padding)).sort((a, b) => points[a].padding - points[b].padding);
  const share = (place) => `${points[place].padding.toFixed(0)} % at ${listed([place])}`;
  const padding = padded.length > 1 ? ` Padding, work for nothing: ${padded.map(share).join(", ")}.` : "";
  return rate + late + failed + padding;
}

function refresh() {
  const latest = samples[samples.length - 1];
  const times = [], series = latest.arms.map(() => []);
  samples.forEach((sample, place) => {
    const before = samples.slice(0, place).find((other) => sample.at - other.at <= SMOOTH_SECONDS + 0.25);
    if (!before) return;
    times.push(sample.at);
    series.forEach((points, index) => points.push(pointOf(sample, before, index)));
  });
  if (!times.length) return;
  find("now").replaceChildren(...latest.arms.map((arm, index) => row(arm.name, series[index][times.length - 1], index)));
  find("verdict").textContent = inWords(latest.arms.map((arm) => arm.name), series.map((points) => points[times.length - 1]));
  CHARTS.forEach((chart, place) => {
    find("charts").children[place].querySelector("svg").replaceWith(draw(chart, times, series, latest.deadline_ms, latest.at));
  });
  document.documentElement.dataset.ready = "yes";
}

function introduce(latest) {
  const { load, deadline_ms: deadline } = latest;
  const due = latest.deadlines_differ ? "Every model has its own deadline." : deadline ? `A request is due within ${Math.round(deadline)} ms.` : "Requests have no deadline.";
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
    const caption = tag("figcaption", { "data-key": chart.keys[0] }, tag("b", {}, chart.title), chart.unit);
    find("charts").append(tag("figure", {}, caption, canvas(WIDTH, HEIGHT, chart.title)));
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
    refresh();
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
