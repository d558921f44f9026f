// What a strategy costs against what it reaches; the line joins those that none beats in both.
function frontOf(points) {
  const front = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!front.length || point.y > front[front.length - 1].y) front.push(point);
  }
  return front;
}

function drawPareto(cell, width) {
  const points = data.ends
    .filter((end) => end.cell === cell && isShown(end.strategy) && isNumber(end[state.cost]) && isNumber(end.metric) && end[state.cost] > 0)
    .map((end) => ({ end, x: end[state.cost], y: end.metric, name: data.strategies[end.strategy].name, slot: slotOf(end.strategy) }));
  if (!points.length) return tag("p", { class: "note" }, "No finished run here.");
  points.sort((a, b) => rankOf(a.slot) - rankOf(b.slot));
  const wide = width >= 620;
  const frame = { left: 46, right: width - (wide ? 160 : 14), top: 24, bottom: wide ? 344 : 244 };
  const costs = points.map((point) => point.x);
  const x = makeScale(Math.min(...costs) / 1.15, Math.max(...costs) * 1.15, frame.left, frame.right, "log");
  const [low, high] = usualRange(points.flatMap(({ end }) => [end.metricLow, end.metricHigh]), 0.2);
  const room = 0.08 * (high - low || 0.1);
  const y = makeScale(low - room, high + room, frame.bottom, frame.top);
  const metric = data.cells[cell].metric ?? "quality";
  const drawing = canvas(width, frame.bottom + 42, `${data.cells[cell].dataset} · ${data.cells[cell].model}: ${metric} by ${AXES[state.cost]}`);
  drawing.append(...drawAxes(x, y, frame, { xTicks: wide ? 7 : 4, xName: `${AXES[state.cost]} (log), fewer is cheaper`, yName: metric }));
  const front = frontOf(points);
  const clip = `clip-pareto-${cell}`;
  const plane = svg("g", { "clip-path": `url(#${clip})` }, svg("path", { d: stepsOf(front, x, y), class: "front" }));
  for (const point of points) plane.append(...drawEnd(point, x, y));
  drawing.append(clipTo(clip, frame), plane, ...nameEnds(points, front, x, y, frame, width));
  const outside = points.filter((point) => point.y < y.low || point.y > y.high).length;
  if (outside) drawing.append(label(`${outside} ${outside === 1 ? "mark lies" : "marks lie"} outside`, frame.right, frame.top - 9, "end"));
  followEnds(drawing, { cell, points, x, y, width, metric });
  return drawing;
}

function drawEnd({ end, x: cost, y: value, slot, name }, x, y) {
  const mark = slot === "base"
    ? svg("rect", { x: x(cost) - 5, y: y(value) - 5, width: 10, height: 10, class: `mark ${slot}`, "data-strategy": name })
    : svg("circle", { cx: x(cost), cy: y(value), r: slot === "rest" ? 4 : 5.5, class: `mark ${slot}`, "data-strategy": name });
  return [svg("line", { x1: x(cost), x2: x(cost), y1: y(end.metricLow), y2: y(end.metricHigh), class: `whisker ${slot}` }), mark];
}

// Names where there is room: highlighted ones and the front first; the others are under the pointer.
function nameEnds(points, front, x, y, frame, width) {
  const taken = points.map((point) => [x(point.x) - 5, y(point.y) - 5, x(point.x) + 5, y(point.y) + 5]);
  const hits = (box) => taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1]);
  const wanted = points.filter((point) => point.slot !== "rest" || front.includes(point)).reverse();
  const names = [];
  for (const point of wanted) {
    const [px, py, long] = [x(point.x), y(point.y), point.name.length * 6.7];
    const choices = [["start", px + 9, py + 4], ["end", px - 9, py + 4], ["middle", px, py - 10], ["middle", px, py + 20],
      ["start", px + 7, py - 8], ["start", px + 7, py + 17], ["end", px - 7, py - 8], ["end", px - 7, py + 17]];
    for (const [anchor, left, bottom] of choices) {
      const from = { start: left, end: left - long, middle: left - long / 2 }[anchor];
      const box = [from, bottom - 11, from + long, bottom + 3];
      if (from < frame.left || from + long > width || bottom < frame.top || bottom > frame.bottom || hits(box)) continue;
      taken.push(box);
      names.push(label(point.name, left, bottom, `direct ${anchor} ${point.slot}`));
      break;
    }
  }
  return names;
}

function followEnds(drawing, { cell, points, x, y, width, metric }) {
  const reveal = (point, event) => tip.show(
    `${point.name}, ${point.end.seeds} ${point.end.seeds === 1 ? "seed" : "seeds"}`,
    [
      { slot: point.slot, name: metric, value: `${show(point.y)} (${show(point.end.metricLow)} to ${show(point.end.metricHigh)})` },
      { slot: point.slot, name: "updates", value: show(point.end.updates) },
      ...(isNumber(point.end.simulated) ? [{ slot: point.slot, name: "simulated seconds", value: show(point.end.simulated) }] : []),
      { slot: point.slot, name: "measured seconds", value: show(point.end.seconds) },
    ],
    event,
  );
  let place = -1;
  followPointer(drawing, width, {
    onPoint(px, py, event) {
      const away = (point) => Math.hypot(x(point.x) - px, y(point.y) - py);
      const near = points.reduce((best, point) => (away(point) < away(best) ? point : best));
      if (away(near) < 28) reveal(near, event);
      else tip.hide();
    },
    onStep(step) {
      place = (place + step + points.length) % points.length;
      reveal(points[place], onScreen(drawing, width, x(points[place].x), y(points[place].y)));
    },
    onLeave: () => tip.hide(),
  });
}
