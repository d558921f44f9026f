// Elements, scales, axes, lines, marks and labels that every chart uses.
const NS = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(NS, name), attributes, children);
const tag = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const label = (content, x, y, kind = "") => svg("text", { x, y, class: kind }, content);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// A drawing of a fixed width in its own units, which the page scales.
function canvas(width, height, name) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
}

// A number with as many digits as a reader can use.
function show(value) {
  if (!isNumber(value)) return "none";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

const showTick = (value) => (Math.abs(value) >= 1000 ? `${Number((value / 1000).toPrecision(3)).toLocaleString("en")}k` : show(value));

// The smallest of 1, 2 and 5 times a power of ten that is not below the wanted value.
function roundStep(wanted) {
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= wanted * (1 - 1e-9));
}

function linearTicks(low, high, count) {
  const step = roundStep((high - low) / count);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, count) {
  for (const factors of [[1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const factor of factors) {
        const tick = Number((factor * 10 ** power).toPrecision(12));
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    }
    if (ticks.length <= count + 1) return ticks.length >= 2 ? ticks : linearTicks(low, high, count);
  }
  return linearTicks(low, high, count).filter((tick) => tick > 0);
}

function sizeTicks(low, high, count) {
  const powers = [];
  for (let power = Math.ceil(Math.log2(low) - 1e-9); 2 ** power <= high * (1 + 1e-9); power += 1) powers.push(2 ** power);
  const every = Math.max(1, Math.ceil(powers.length / count));
  return powers.length ? powers.filter((_, place) => place % every === 0) : linearTicks(low, high, count);
}

// Maps values to places: "linear", "log", or "size", a logarithm with ticks at powers of two.
function makeScale(low, high, from, to, kind = "linear") {
  const bend = kind === "linear" ? (value) => value : Math.log;
  if (!(high > low)) [low, high] = kind === "linear" ? [low - 0.5, low + 0.5] : [low / 1.5, low * 1.5];
  const scale = (value) => from + ((bend(value) - bend(low)) / (bend(high) - bend(low))) * (to - from);
  scale.ticks = (count) => ({ linear: linearTicks, log: logTicks, size: sizeTicks })[kind](low, high, count);
  scale.low = low;
  scale.high = high;
  return scale;
}

// The lowest and the highest value, without those further off than three times what half of the values span, and than
// a given distance that is never far.
function usualRange(values, near) {
  const sorted = [...values].sort((a, b) => a - b);
  const [first, last] = [0.25, 0.75].map((share) => sorted[Math.round(share * (sorted.length - 1))]);
  const reach = Math.max(3 * (last - first), near);
  const usual = sorted.filter((value) => value >= first - reach && value <= last + reach);
  return [usual[0], usual[usual.length - 1]];
}

// A clip path of a frame, with room for half the width of a line.
function clipTo(id, { left, right, top, bottom }) {
  return svg("clipPath", { id }, svg("rect", { x: left - 2, y: top - 2, width: right - left + 4, height: bottom - top + 4 }));
}

// Grid lines with their values, the axis below and the names of both axes; no labels below without xLabels.
function drawAxes(x, y, frame, { xTicks = 5, yTicks = 5, xLabels = true, xName = "", yName = "" }) {
  const parts = [];
  for (const tick of y.ticks(yTicks)) {
    parts.push(svg("line", { x1: frame.left, x2: frame.right, y1: y(tick), y2: y(tick), class: "grid" }));
    parts.push(label(showTick(tick), frame.left - 6, y(tick) + 4, "end"));
  }
  parts.push(svg("line", { x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom, class: "axis" }));
  if (xLabels) {
    for (const tick of x.ticks(xTicks)) {
      parts.push(svg("line", { x1: x(tick), x2: x(tick), y1: frame.bottom, y2: frame.bottom + 4, class: "axis" }));
      parts.push(label(showTick(tick), x(tick), frame.bottom + 18, "middle"));
    }
  }
  if (xName) parts.push(label(xName, frame.right, frame.bottom + 35, "end name"));
  if (yName) parts.push(label(yName, frame.left - 40, frame.top - 9, "name"));
  return parts;
}

// The path of a line through points {x, y}; one without a value leaves a gap.
function pathOf(points, x, y) {
  let pen = "M";
  return points.map((point) => {
    if (!isNumber(point.y)) {
      pen = "M";
      return "";
    }
    const part = `${pen}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`;
    pen = "L";
    return part;
  }).join("");
}

// The path of a line that keeps its value until the next point.
function stepsOf(points, x, y) {
  return points
    .map((point, place) => (place ? `H${x(point.x).toFixed(1)}V${y(point.y).toFixed(1)}` : `M${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`))
    .join("");
}

// The corners of square, triangle, diamond, and of triangles that point down and to the right; the first series has a circle.
const CORNERS = [
  [], [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], [[0, -1.15], [1.1, 0.85], [-1.1, 0.85]], [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
  [[0, 1.15], [1.1, -0.85], [-1.1, -0.85]], [[1.15, 0], [-0.85, 1.1], [-0.85, -1.1]],
];

// The mark of a series: its shape tells series apart where colours do not.
function marker(kind, x, y, size = 4.5) {
  const corners = CORNERS[kind % CORNERS.length];
  if (!corners.length) return svg("circle", { cx: x, cy: y, r: size, class: `mark s${kind}` });
  const points = corners.map(([dx, dy]) => `${(x + dx * size).toFixed(1)},${(y + dy * size).toFixed(1)}`).join(" ");
  return svg("polygon", { points, class: `mark s${kind}` });
}

// Moves labels apart that would touch, as little as possible, from top to bottom.
function spread(places, gap, top, bottom) {
  const order = places.map((_, index) => index).sort((a, b) => places[a] - places[b]);
  const moved = [...places];
  order.forEach((index, rank) => {
    moved[index] = Math.max(moved[index], rank ? moved[order[rank - 1]] + gap : top);
  });
  [...order].reverse().forEach((index, rank, reversed) => {
    moved[index] = Math.min(moved[index], rank ? moved[reversed[rank - 1]] - gap : bottom);
  });
  return moved;
}

// A short piece of a line, for legends; with the mark of a series in the middle if one is given.
function swatch(slot, kind = null) {
  const line = svg("line", { x1: 1, x2: 21, y1: 7, y2: 7, class: `line ${slot}` });
  return svg("svg", { viewBox: "0 0 22 14", class: "swatch", "aria-hidden": "true" }, line, ...(kind === null ? [] : [marker(kind, 11, 7)]));
}

// The box with values beside the pointer.
const tip = {
  box: null,
  show(title, rows, event) {
    this.box ??= document.body.appendChild(tag("div", { id: "tip", role: "status" }));
    const lines = rows.map(({ slot, name, value }) => tag("div", {}, swatch(slot), tag("span", {}, name), tag("b", {}, value)));
    this.box.replaceChildren(tag("strong", {}, title), ...lines);
    this.box.hidden = false;
    const { offsetWidth: wide, offsetHeight: high } = this.box;
    const left = event.clientX + 16 + wide > innerWidth ? event.clientX - wide - 16 : event.clientX + 16;
    const top = Math.min(event.clientY + 12, innerHeight - high - 8);
    this.box.style.left = `${Math.max(8, left)}px`;
    this.box.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    if (this.box) this.box.hidden = true;
  },
};

// Calls onPoint with the pointer's place in the drawing, onStep with -1 or 1 for arrow keys, and onLeave at the end.
function followPointer(drawing, width, { onPoint, onStep, onLeave }) {
  drawing.setAttribute("tabindex", 0);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    onPoint(((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * width) / box.width, event);
  });
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    onStep(step);
  });
  drawing.addEventListener("pointerleave", onLeave);
  drawing.addEventListener("blur", onLeave);
}

// Where a place in the drawing is on the screen, as an event has it.
function onScreen(drawing, width, x, y) {
  const box = drawing.getBoundingClientRect();
  return { clientX: box.left + (x * box.width) / width, clientY: box.top + (y * box.width) / width };
}
