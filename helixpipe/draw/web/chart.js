// Drawing a panel on its canvas: rows of ops, lanes of transfers, memory, the time axis.

const FONT = "system-ui, sans-serif";
const plotWidth = panel => panel.plotWidth ??= Math.max(panel.canvas.clientWidth - LEFT - RIGHT, 10);  // until it is drawn anew
const xOf = (panel, time) => LEFT + (time - panel.view.from) / (panel.view.to - panel.view.from) * plotWidth(panel);
const timeAt = (panel, x) => panel.view.from + (x - LEFT) / plotWidth(panel) * (panel.view.to - panel.view.from);

function readTheme() {  // the page's colours, light or dark as the reader's system is
  const style = getComputedStyle(document.documentElement), read = name => style.getPropertyValue("--" + name).trim();
  page.theme = Object.fromEntries(["ink", "soft", "line", "idle", "lane", "paper", "accent", "device", "host", "bad"]
    .map(name => [name, read(name)]));
}

function draw(panel) {
  const {canvas} = panel;
  panel.plotWidth = undefined;
  panel.layout(page.settings);
  const ratio = Math.min(devicePixelRatio || 1, 32000 / panel.height);  // no canvas is taller
  canvas.style.height = panel.height + "px";
  const wide = Math.round(canvas.clientWidth * ratio), tall = Math.round(panel.height * ratio);
  if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, {width: wide, height: tall});
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.clientWidth, panel.height);
  pen.textBaseline = "middle";
  drawLabels(panel, pen);
  panel.longLabels = roomForCells(panel, pen);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, plotWidth(panel), panel.plotHeight);
  pen.clip();
  for (const strip of panel.strips) {
    if (strip.type === OPS) drawTasks(panel, pen, strip, page.theme.idle, op => lookOf(panel, op));
    else if (strip.type === "device" || strip.type === "host") drawMemory(panel, pen, strip);
    else drawTasks(panel, pen, strip, page.theme.lane, laneLook(panel, strip));
  }
  drawMarks(panel, pen);
  pen.restore();
  drawAxis(panel, pen);
}

function requestDraw(panels = page.panels) {  // once a frame, however much happens in it
  panels.forEach(panel => page.stale.add(panel));
  page.frame ||= requestAnimationFrame(() => {
    page.frame = 0;
    const stale = [...page.stale];
    page.stale.clear();
    stale.forEach(draw);
  });
}

// ---------------------------------------------------------------------------------------------------------- colours

function lookOf(panel, op) {
  if (page.settings.colour === "difference" && panel.compared?.alike) return differenceColour(durationRatio(panel, op), page.limit);
  return panel.looks[panel.ops.rank[op]][panel.ops.stage[op] + panel.ops.kind[op]];
}

function laneLook(panel, strip) {
  const look = colour => ({fill: colour, ink: "#111"});
  if (strip.type === COPY) {
    const own = look(page.data.lanes.find(lane => lane.lane === strip.label).colour);
    return () => own;
  }
  const looks = page.data[strip.type === MESSAGE ? "links" : "sharing"].map(style => look(style.colour));
  return task => looks[panel.whatIs(task).kind];
}

// ----------------------------------------------------------------------------------------------------------- labels

function drawLabels(panel, pen) {
  const {theme} = page, width = panel.canvas.clientWidth, every = Math.ceil(14 / panel.rowHeight);
  for (const strip of panel.strips) {
    const middle = strip.top + strip.height / 2;
    if (strip.type === OPS) {
      if (panel.strips.length === panel.ranks && strip.rank % every) continue;
      pen.font = `12px ${FONT}`;
      pen.fillStyle = theme.ink;
      pen.textAlign = "left";
      pen.fillText("rank " + strip.rank, 2, middle);
      pen.fillStyle = theme.soft;
      if (!panel.data.circle) pen.fillText(percent(panel.idle[strip.rank]), width - RIGHT + 8, middle);
    } else if (strip.height >= 8) {
      pen.font = `${Math.min(11, Math.max(8, strip.height * 0.75))}px ${FONT}`;
      pen.fillStyle = theme.soft;
      pen.textAlign = "right";
      pen.fillText(strip.label ?? strip.type, LEFT - 6, middle);
      if (strip.label) continue;
      pen.textAlign = "left";
      const most = panel.memory[strip.rank].most[strip.type === "host" ? 1 : 0];
      pen.fillText(memoryText(most, panel.data.memory.unit), width - RIGHT + 8, middle);
    }
  }
}

function labelOf(panel, task, long) {  // the microbatch, and its chunk if there are several; or the whole cell
  const what = panel.whatIs(task), op = what.op ?? what.producer ?? task;
  if (op < 0) return "";
  if (long) return cellOf(panel, op);
  return panel.data.chunked ? panel.ops.microbatch[op] + "." + (panel.ops.chunk[op] ?? 0) : String(panel.ops.microbatch[op]);
}

function roomForCells(panel, pen) {  // whether nearly all ops in sight can have their whole cell as label
  const {view, times} = panel;
  let fitting = 0, seen = 0;
  pen.font = `${Math.min(13, panel.rowHeight * 0.58)}px ${FONT}`;
  for (const row of panel.rows)
    for (let i = panel.firstEndingAfter(row, view.from); i < row.length && times.start[row[i]] < view.to && seen < 300; i++, seen++)
      fitting += pen.measureText(cellOf(panel, row[i])).width + 6 < xOf(panel, times.end[row[i]]) - xOf(panel, times.start[row[i]]);
  return fitting > 0.9 * seen;
}

// ------------------------------------------------------------------------------------------------------------ tasks

function textWidth(pen, text) {  // measuring is slow, and there are few texts
  const key = pen.font + text;
  if (!page.widths.has(key)) page.widths.set(key, pen.measureText(text).width);
  return page.widths.get(key);
}

function drawTasks(panel, pen, strip, empty, look) {
  const {view, times} = panel, {tasks, height} = strip, isOps = strip.type === OPS;
  const gap = height >= 16 ? 2 : height >= 8 ? 1 : 0.5, top = strip.top + gap / 2, tall = height - gap;
  const size = Math.min(13, tall * (isOps ? 0.58 : 0.8)), bright = panel.found ?? (page.settings.path && panel.path.length ? panel.onPath : null);
  pen.font = `${size}px ${FONT}`;
  pen.textAlign = "center";
  pen.fillStyle = empty;
  const until = panel.data.circle ? panel.times.makespan : panel.span;
  pen.fillRect(xOf(panel, 0), top, xOf(panel, until) - xOf(panel, 0), tall);
  let drawn = -1;  // up to which pixel; of tasks that share one the first is drawn
  for (let i = panel.firstEndingAfter(tasks, view.from); i < tasks.length && times.start[tasks[i]] < view.to; i++) {
    const task = tasks[i], x = xOf(panel, times.start[task]), end = xOf(panel, times.end[task]), wide = end - x;
    if (end - drawn < 0.3) {
      i = Math.max(i, panel.firstEndingAfter(tasks, timeAt(panel, drawn + 0.3)) - 1);
      continue;
    }
    drawn = end;
    const {fill, ink} = look(task);
    pen.globalAlpha = bright && !bright.has(task) ? 0.3 : panel.stuck?.has(task) ? 0.35 : 1;
    pen.fillStyle = fill;
    pen.fillRect(x, top, wide > 3 ? wide - 0.8 : Math.max(wide, 0.6), tall);
    if (wide < 7 || size < 6) continue;
    const text = labelOf(panel, task, isOps && panel.longLabels);
    if (textWidth(pen, text) > wide - 4) continue;
    pen.fillStyle = ink;
    const left = Math.max(x, LEFT), right = Math.min(end, LEFT + plotWidth(panel));
    pen.fillText(text, (left + right) / 2, top + tall / 2 + 0.5);
  }
  pen.globalAlpha = 1;
}

// ----------------------------------------------------------------------------------------------------------- memory

function memoryTop(panel, which) {  // the most of any rank of any timeline, if it is in the same unit
  return Math.max(...page.panels.map(each => each.memoryUnit === panel.memoryUnit ? each.memoryTop?.[which - 1] ?? 0 : 0));
}

function drawMemory(panel, pen, strip) {  // from 0 to the top
  const {theme} = page, which = strip.type === "host" ? 2 : 1, {steps, least} = panel.memory[strip.rank];
  const bottom = strip.top + strip.height - 1, scale = (strip.height - 3) / (memoryTop(panel, which) || 1);
  const from = xOf(panel, 0), to = xOf(panel, panel.times.makespan);
  pen.fillStyle = theme.lane;
  pen.fillRect(from, strip.top + 1, to - from, strip.height - 2);
  pen.fillStyle = theme[strip.type];
  pen.globalAlpha = 0.75;
  let index = 0;
  while (index + 1 < steps.length && steps[index + 1][0] <= panel.view.from) index++;
  pen.beginPath();
  pen.moveTo(xOf(panel, steps[index][0]), bottom);
  for (; index < steps.length && steps[index][0] <= panel.view.to; index++) {
    const x = xOf(panel, steps[index][0]), next = index + 1 < steps.length ? xOf(panel, steps[index + 1][0]) : to;
    const y = bottom - steps[index][which] * scale;
    pen.lineTo(x, y);
    if (next > x) pen.lineTo(next, y);
    else if (index + 1 < steps.length && steps[index][which] > steps[index + 1][which]) {  // the most of a moment
      pen.lineTo(x + 0.8, y);
      pen.lineTo(x + 0.8, bottom - steps[index + 1][which] * scale);
    }
  }
  pen.lineTo(Math.min(to, xOf(panel, panel.view.to) + 2), bottom);
  pen.fill();
  pen.globalAlpha = 1;
  if (!least[which - 1]) return;
  const y = bottom - least[which - 1] * scale;  // what is there at all times
  pen.strokeStyle = theme.ink;
  pen.globalAlpha = 0.35;
  pen.lineWidth = 1;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(from, y);
  pen.lineTo(to, y);
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

// ------------------------------------------------------------------------------------------------------------- axis

function drawAxis(panel, pen) {
  const {view} = panel, {theme} = page, y = panel.plotHeight + 2, span = view.to - view.from;
  pen.fillStyle = theme.soft;
  pen.font = `11px ${FONT}`;
  pen.textAlign = "center";
  const middle = LEFT + plotWidth(panel) / 2;
  if (panel.data.circle) return void pen.fillText("place in the order of the rank", middle, y + 10);
  const rough = span / Math.max(plotWidth(panel) / 100, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(times => times * power >= rough * 0.999);
  pen.strokeStyle = theme.line;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(LEFT, y + 0.5);
  pen.lineTo(LEFT + plotWidth(panel), y + 0.5);
  const [scale, unit] = panel.unit === "s" ? (view.to >= 1 ? [1, "s"] : view.to >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"]) : [1, ""];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  for (let n = Math.ceil(view.from / step - 1e-9); n * step <= view.to + step * 1e-9; n++) {
    const x = xOf(panel, n * step);
    pen.moveTo(x, y);
    pen.lineTo(x, y + 5);
    pen.fillText((n * step * scale).toFixed(digits), x, y + 13);
  }
  pen.stroke();
  pen.fillText(unit ? `time (${unit})` : "time (in the unit of the piece times)", middle, y + 27);
}
