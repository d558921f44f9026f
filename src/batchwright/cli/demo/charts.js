// The charts of the demo: lengths, padding, loss, tokens and shapes of the batches; and the marks in its table.
const { bins, groupings, arms, maxTokens } = JSON.parse(document.getElementById("data").textContent);
const WIDTH = 460, HEIGHT = 300, BARS = 164; // the names of horizontal bars stand to the left of BARS
const FRAME = { left: 48, right: WIDTH - 14, top: 30, bottom: HEIGHT - 46 };
const text = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// A mark that says what it is when the pointer is over it.
function hover(mark, what) {
  mark.append(svg("title", {}, what));
  return mark;
}

function bar(what, x, end, y, height, shade) {
  return hover(svg("rect", { x, y, width: end - x, height, class: `mark ${shade}` }), what);
}

function drawLengths(drawing) {
  const x = makeScale(0, bins.length, FRAME.left, FRAME.right);
  const y = makeScale(0, 1.1 * Math.max(...bins.map(({ count }) => count)), FRAME.bottom, FRAME.top);
  const every = bins.length > 10 ? 2 : 1; // writing every bound would make them touch
  drawing.append(...drawAxes(x, y, FRAME, { xLabels: false, xName: "tokens per function (from)", yName: "functions" }));
  bins.forEach(({ low, range, count }, place) => {
    const box = { x: x(place) + 1, y: y(count), width: x(1) - x(0) - 2, height: y(0) - y(count), class: "mark s0" };
    drawing.append(hover(svg("rect", box), `${range} tokens: ${text(count)} ${count === 1 ? "function" : "functions"}`));
    if (place % every === 0) drawing.append(label(low, x(place), y(0) + 18, "middle"));
  });
}

const PADDING_ROW = 29;

function drawPadding(drawing) {
  const bottom = PADDING_ROW * groupings.length + 6;
  const x = makeScale(0, 1, BARS, WIDTH - 52);
  groupings.forEach(({ name, padding, batches }, place) => {
    const y = 8 + place * PADDING_ROW;
    const shade = name.startsWith("fixed") ? "rest" : "s0";
    const what = `${name}: ${percent(padding)} padding in ${text(batches)} batches`;
    drawing.append(
      label(name, BARS - 8, y + 16, "end"),
      bar(what, BARS, Math.max(x(padding), BARS + 1), y + 3, PADDING_ROW - 9, shade),
      label(percent(padding), x(padding) + 6, y + 16),
    );
  });
  drawing.append(svg("line", { x1: BARS, x2: BARS, y1: 4, y2: bottom, class: "axis" }));
  drawing.append(label("padding as a share of the padded tokens", FRAME.right, bottom + 24, "name end"));
}

// The validation loss of each arm along one of its figures.
function drawLoss(drawing, along, unit) {
  // The first check of an arm is still on the steep part; it may lie above the frame, where its line comes from.
  const losses = arms.flatMap(({ checks }) => (checks.length > 1 ? checks.slice(1) : checks).map(({ loss }) => loss));
  const [low, high] = usualRange(losses, 1);
  const room = 0.08 * (high - low) || 0.1;
  const furthest = Math.max(...arms.flatMap(({ checks }) => checks.map((check) => check[along])));
  const x = makeScale(0, 1.03 * furthest, FRAME.left, FRAME.right);
  const y = makeScale(low - room, high + 2 * room, FRAME.bottom, FRAME.top);
  const clip = `clip-${along}`;
  const plane = svg("g", { "clip-path": `url(#${clip})` });
  drawing.append(clipTo(clip, FRAME));
  const xName = { seconds: "processor seconds of training", examples: "examples seen" }[along];
  drawing.append(...drawAxes(x, y, FRAME, { xName, yName: "validation loss per token" }), plane);
  arms.forEach(({ name, checks }, kind) => {
    plane.append(svg("path", { d: pathOf(checks.map((check) => ({ x: check[along], y: check.loss })), x, y), class: `line s${kind}` }));
    for (const check of checks.filter(({ loss }) => loss >= y.low && loss <= y.high)) {
      const what = `${name}: loss ${check.loss.toFixed(3)} after ${text(check[along])} ${unit}`;
      drawing.append(hover(marker(kind, x(check[along]), y(check.loss)), what));
    }
  });
}

const WORK_ROW = 42;

function drawWork(drawing) {
  const bottom = WORK_ROW * arms.length + 8;
  const x = makeScale(0, Math.max(...arms.map(({ padded }) => padded)), BARS, FRAME.right);
  for (const tick of x.ticks(4)) {
    drawing.append(svg("line", { x1: x(tick), x2: x(tick), y1: 4, y2: bottom, class: "grid" }));
    drawing.append(label(showTick(tick), x(tick), bottom + 18, "middle"));
  }
  arms.forEach(({ name, tokens, padded }, kind) => {
    const y = 8 + kind * WORK_ROW;
    drawing.append(
      label(name, BARS - 8, y + 19, "end"),
      bar(`${name}: ${text(tokens)} real tokens`, BARS, x(tokens), y, WORK_ROW - 14, `s${kind}`),
      bar(`${name}: ${text(padded - tokens)} tokens of padding`, x(tokens), x(padded), y, WORK_ROW - 14, `wasted s${kind}`),
    );
  });
  drawing.append(label("tokens computed", FRAME.right, bottom + 35, "name end"));
}

function drawShapes(drawing) {
  const lengths = arms.flatMap(({ shapes }) => shapes.map(([, length]) => length));
  const most = Math.max(...arms.flatMap(({ shapes }) => shapes.map(([items]) => items)));
  const x = makeScale(0.9 * Math.min(...lengths), 1.1 * Math.max(...lengths), FRAME.left, FRAME.right, "log");
  const y = makeScale(0.8, 1.25 * most, FRAME.bottom, FRAME.top, "log");
  drawing.append(...drawAxes(x, y, FRAME, { xName: "padded length of the batch (log)", yName: "examples in the batch (log)" }));
  const ends = [Math.max(x.low, maxTokens / y.high), x.high].map((length) => ({ x: length, y: maxTokens / length }));
  drawing.append(hover(svg("path", { d: pathOf(ends, x, y), class: "limit" }), `${text(maxTokens)} padded tokens`));
  // The first arm has the fewest marks and is drawn last, on top.
  [...arms.entries()].reverse().forEach(([kind, { name, shapes }]) => {
    for (const [items, length] of shapes) {
      const mark = drawing.appendChild(marker(kind, x(length), y(items), 3.2));
      mark.classList.add("pale");
      hover(mark, `${name}: ${items} of ${length} = ${text(items * length)} padded tokens`);
    }
  });
}

const CHARTS = [
  { draw: drawLengths, name: "Histogram of lengths", title: "How long the functions are",
    note: "Most are short, a few are cut at the limit. The bins widen to the right." },
  { draw: drawPadding, name: "Padding by grouping", title: "Padding by grouping", height: PADDING_ROW * groupings.length + 40,
    note: `The same functions and the same budget of ${text(maxTokens)} padded tokens. Grey: fixed size.` },
  { draw: (drawing) => drawLoss(drawing, "seconds", "s"), name: "Loss by seconds", title: "Loss against time", legend: true,
    note: "Further left is faster, lower is better. Processor seconds of training on one thread; the lines start above the chart." },
  { draw: (drawing) => drawLoss(drawing, "examples", "examples"), name: "Loss by examples", title: "Loss against examples", legend: true,
    note: "The same examples, no matter how long they took. Fewer, larger updates learn less from each example." },
  { draw: drawWork, name: "Tokens computed by each arm", title: "What was computed", height: WORK_ROW * arms.length + 52,
    note: "Every arm needs the same real tokens (solid). The pale part is padding, which is computed for nothing." },
  { draw: drawShapes, name: "Shapes of the batches", title: "Shapes of the batches", legend: true,
    note: "Each mark is a batch. On the dashed line it uses the whole budget, below the line only a part." },
];

function figureOf({ draw, name, title, note, height = HEIGHT, legend = false }) {
  const drawing = canvas(WIDTH, height, name);
  draw(drawing);
  const names = arms.map((arm, kind) => tag("li", {}, swatch(`s${kind}`, kind), arm.name));
  const caption = tag("figcaption", {}, tag("b", {}, title), note);
  return tag("figure", {}, caption, ...(legend ? [tag("ul", { class: "legend" }, ...names)] : []), drawing);
}

document.getElementById("charts").append(...CHARTS.map(figureOf));
document.querySelectorAll(".cards td:first-child").forEach((cell, kind) => cell.prepend(swatch(`s${kind}`, kind)));
if (innerWidth < 704) for (const part of document.querySelectorAll(".part")) part.open = false; // style.css: a phone's layout
document.documentElement.dataset.ready = "yes";
