// Loss or quality as training goes on, with the batch size underneath.
const AXES = { examples: "examples", updates: "updates", simulated: "simulated seconds", seconds: "measured seconds" };
const VALUES = { loss: "validation loss", metric: "quality", train: "training loss" };

function valueName(cell) {
  return state.y === "metric" ? data.cells[cell].metric ?? "quality" : VALUES[state.y];
}

// The points of a line that have both coordinates.
function pointsOf(curve, x, y) {
  return curve.examples
    .map((_, place) => ({ x: curve[x][place], y: curve[y][place], place }))
    .filter((point) => isNumber(point.x) && isNumber(point.y));
}

function bandOf(curve, x, y) {
  const ends = ["High", "Low"].map((end) => pointsOf(curve, state.x, state.y + end).filter((point) => state.y === "metric" || point.y > 0));
  if (ends.some((points) => points.length < 2)) return null;
  return `${pathOf(ends[0], x, y)}L${pathOf(ends[1].reverse(), x, y).slice(1)}Z`;
}

// The range of values once the first steep fall is over, without those far off; what lies outside is clipped.
function valueRange(lines, longest) {
  const late = lines.flatMap(({ points }) => points.filter((point) => point.x >= 0.15 * longest).map((point) => point.y));
  const values = (late.length ? late : lines.flatMap(({ points }) => points.map((point) => point.y))).filter((value) => state.y === "metric" || value > 0);
  if (state.y !== "metric") {
    const [low, high] = usualRange(values.map(Math.log), 1).map(Math.exp);
    return [low / 1.08, high * 1.08];
  }
  const [low, high] = usualRange(values, 0.2);
  const room = 0.06 * (high - low || 1);
  return [low - room, high + room];
}

// How many lines leave the plot after the first steep fall.
const numLeaving = (lines, longest, y) =>
  lines.filter(({ points }) => points.some((point) => point.x >= 0.15 * longest && (point.y > y.high || point.y < y.low))).length;

function drawCurves(cell, width) {
  const lines = data.curves
    .filter((curve) => curve.cell === cell && isShown(curve.strategy))
    .map((curve) => ({ curve, slot: slotOf(curve.strategy), points: pointsOf(curve, state.x, state.y) }))
    .filter(({ points }) => points.length);
  if (!lines.length) return tag("p", { class: "note" }, `No run with a ${VALUES[state.y]} here.`);
  lines.sort((a, b) => rankOf(a.slot) - rankOf(b.slot));
  const wide = width >= 620;
  const [high, low] = wide ? [300, 92] : [200, 70];
  const frame = { left: 46, right: width - (wide ? 190 : 10), top: 24, bottom: 24 + high };
  const under = { left: frame.left, right: frame.right, top: frame.bottom + 34, bottom: frame.bottom + 34 + low };
  const longest = Math.max(...lines.flatMap(({ points }) => points.map((point) => point.x)));
  const x = makeScale(0, longest, frame.left, frame.right);
  const y = makeScale(...valueRange(lines, longest), frame.bottom, frame.top, state.y === "metric" ? "linear" : "log");
  const sizes = lines.flatMap(({ curve }) => curve.size.filter(isNumber));
  // A little room on top: the label of the largest size would touch the name of the axis.
  const size = makeScale(Math.min(...sizes), Math.max(...sizes), under.bottom, under.top + 5, "size");
  const name = `${data.cells[cell].dataset} · ${data.cells[cell].model}: ${valueName(cell)} by ${AXES[state.x]}, with the batch size`;
  const drawing = canvas(width, under.bottom + 42, name);
  const clip = `clip-${cell}`;
  drawing.append(clipTo(clip, frame), clipTo(`${clip}-size`, under));
  drawing.append(...drawAxes(x, y, frame, { xLabels: false, yName: `${valueName(cell)}${state.y === "metric" ? "" : " (log)"}` }));
  drawing.append(...drawAxes(x, size, under, { xTicks: wide ? 7 : 4, yTicks: 3, xName: AXES[state.x], yName: "batch size" }));
  const plane = drawing.appendChild(svg("g", { "clip-path": `url(#${clip})` }));
  const below = drawing.appendChild(svg("g", { "clip-path": `url(#${clip}-size)` }));
  for (const { curve, slot, points } of lines) {
    if (slot !== "rest" && curve.seeds > 1) {
      const band = state.y === "train" ? null : bandOf(curve, x, y);
      if (band) plane.append(svg("path", { d: band, class: `band ${slot}` }));
    }
    plane.append(svg("path", { d: pathOf(points, x, y), class: `line ${slot}`, "data-strategy": data.strategies[curve.strategy].name }));
    below.append(svg("path", { d: stepsOf(pointsOf(curve, state.x, "size"), x, size), class: `line ${slot} size` }));
  }
  const leaving = numLeaving(lines, longest, y);
  if (leaving) drawing.append(label(`${leaving} ${leaving === 1 ? "line leaves" : "lines leave"} the plot`, frame.right, frame.top - 9, "end"));
  if (wide) drawing.append(...endLabels(lines.filter(({ slot }) => slot !== "rest"), x, y, frame));
  const guide = drawing.appendChild(svg("line", { y1: frame.top, y2: under.bottom, class: "guide", visibility: "hidden" }));
  followCurves(drawing, { cell, lines, x, y, longest, frame, guide, width });
  return drawing;
}

function endLabels(lines, x, y, frame) {
  const ends = lines.map(({ points }) => points[points.length - 1]);
  const heights = ends.map((end) => Math.max(frame.top, Math.min(frame.bottom, y(end.y))));
  const places = spread(heights.map((height) => height + 4), 16, frame.top + 4, frame.bottom + 4);
  return lines.flatMap(({ curve, slot }, index) => [
    svg("path", { d: `M${x(ends[index].x) + 3} ${heights[index]}L${frame.right + 8} ${places[index] - 4}`, class: "leader" }),
    label(data.strategies[curve.strategy].name, frame.right + 11, places[index], `direct ${slot}`),
  ]);
}

// Values under the pointer, or at the arrow keys' place.
function followCurves(drawing, { cell, lines, x, y, longest, frame, guide, width }) {
  // The baseline is drawn last; arrow keys walk along its points.
  const walked = lines[lines.length - 1].points;
  let at = longest;
  let place = walked.length - 1;
  const nearest = (points) => points.reduce((best, point) => (Math.abs(point.x - at) < Math.abs(best.x - at) ? point : best));
  const reveal = (event, py) => {
    const reached = lines.filter(({ points }) => points[points.length - 1].x >= at - 0.02 * longest);
    const found = reached.map((line) => ({ ...line, point: nearest(line.points) }));
    if (!found.length) return;
    const close = py === null ? null : found.reduce((best, one) => (Math.abs(y(one.point.y) - py) < Math.abs(y(best.point.y) - py) ? one : best));
    // The guide stands where values were taken, at the point of the nearest line.
    if (close) at = close.point.x;
    const rows = found.filter((one) => one.slot !== "rest" || one === close).sort((a, b) => y(a.point.y) - y(b.point.y));
    guide.setAttribute("x1", x(at));
    guide.setAttribute("x2", x(at));
    guide.setAttribute("visibility", "visible");
    tip.show(
      `${data.cells[cell].dataset} · ${data.cells[cell].model}, ${show(at)} ${AXES[state.x]}`,
      rows.map(({ curve, slot, point }) => ({
        slot,
        name: data.strategies[curve.strategy].name,
        value: `${show(point.y)} · batch ${show(curve.size[point.place])}`,
      })),
      event,
    );
  };
  followPointer(drawing, width, {
    onPoint(px, py, event) {
      at = Math.max(0, Math.min(longest, ((px - frame.left) / (frame.right - frame.left)) * longest));
      reveal(event, py);
    },
    onStep(step) {
      place = Math.max(0, Math.min(walked.length - 1, place + step));
      at = walked[place].x;
      reveal(onScreen(drawing, width, x(at), 20), null);
    },
    onLeave() {
      guide.setAttribute("visibility", "hidden");
      tip.hide();
    },
  });
}
