// A step on a canvas: a row of ops a rank, its memory below, the lower bound; and what is at a point of it.
import {duration, memory, percent} from "./words.js";

const FONT = "system-ui, sans-serif", AXIS = 24, GAP = 5, MEMORY = 96, MEMORY_GAP = 26;
export const LABELS = 66;

export class Chart {
  constructor(element, choices) {
    this.labels = element.querySelector(".labels");
    this.canvas = element.querySelector(".timeline");
    this.scroller = element.querySelector(".scroller");
    this.choices = choices;
    Object.assign(this, {step: null, until: 1, zoom: 1, selected: -1, drag: null, bound: null});
  }

  show(step, until) {  // until: the end of the time axis, which panels share
    this.step = step;
    this.until = until || 1;
    this.rows = [];
    step.ops.rank.forEach((rank, op) => (this.rows[rank] ??= []).push(op));
    const ranks = this.rows.length;
    this.row = ranks > 24 ? 14 : ranks > 12 ? 20 : 28;
    this.top = 4;
    this.bottom = this.top + ranks * (this.row + GAP) + 2;
    this.height = this.bottom + AXIS + (step.memory ? MEMORY + MEMORY_GAP : 0);
    this.draw();
  }

  x(time) { return time / this.until * (this.width - 8) + 2; }
  time(x) { return (x - 2) / (this.width - 8) * this.until; }
  y(rank) { return this.top + rank * (this.row + GAP); }
  place(op) { return this.rows[this.step.ops.rank[op]].indexOf(op); }

  start(op) {  // in the axis's unit; a program that cannot run has its ops side by side
    return this.step.ops.start ? this.step.ops.start[op] : this.place(op);
  }

  end(op) { return this.step.ops.end ? this.step.ops.end[op] : this.place(op) + 1; }

  at(x, y) {  // the op there, or -1
    const rank = Math.floor((y - this.top) / (this.row + GAP)), time = this.time(x);
    return (this.rows[rank] ?? []).find(op => this.start(op) <= time && time < this.end(op)) ?? -1;
  }

  gapAt(rank, x) {  // the place in the rank's order before which something dropped there goes
    const time = this.time(x), row = this.rows[rank];
    const place = row.findIndex(op => time < (this.start(op) + this.end(op)) / 2);
    return place < 0 ? row.length : place;
  }

  // ---------------------------------------------------------------------------------------------------------- drawing

  draw() {
    if (!this.step) return;
    const style = getComputedStyle(document.documentElement), read = name => style.getPropertyValue("--" + name).trim();
    this.theme = Object.fromEntries(["ink", "soft", "faint", "edge", "card", "idle", "accent", "bad", "bound"].map(name => [name, read(name)]));
    this.width = Math.min(30000, Math.max(this.scroller.clientWidth, 200) * this.zoom);
    const pen = sized(this.canvas, this.width, this.height), side = sized(this.labels, LABELS, this.height);
    this.drawLabels(side);
    for (let rank = 0; rank < this.rows.length; rank++) {
      pen.fillStyle = this.theme.idle;
      pen.fillRect(this.x(0), this.y(rank), this.x(this.length()) - this.x(0), this.row);
      for (const op of this.rows[rank]) this.drawOp(pen, op);
    }
    this.drawAxis(pen);
    if (this.bound) this.drawBound(pen);
    if (this.step.memory) this.drawMemory(pen, side);
    if (this.step.circle) this.drawCircle(pen);
    if (this.selected >= 0) this.drawSelected(pen);
    if (this.drag) this.drawDrag(pen);
  }

  length() { return this.step.figures ? this.step.figures.makespan : Math.max(...this.rows.map(row => row.length)); }

  drawOp(pen, op, lift = 0) {
    const {ops} = this.step, {colour} = this.choices.kinds[ops.kind[op]];
    const left = this.x(this.start(op)) + lift, wide = this.x(this.end(op)) + lift - left, top = this.y(ops.rank[op]);
    pen.globalAlpha = this.step.ended && !this.step.ended[op] ? 0.3 : this.drag?.op === op && !lift ? 0.35 : 1;
    pen.fillStyle = colour;
    pen.fillRect(left, top, Math.max(wide - (wide > 3 ? 1 : 0), 0.6), this.row);
    pen.globalAlpha = 1;
    const label = this.step.chunked ? `${ops.microbatch[op]}.${ops.chunk[op]}` : String(ops.microbatch[op]);
    pen.font = `${this.row > 16 ? 12 : 10}px ${FONT}`;
    const long = pen.measureText(ops.cell[op]).width + 6 < wide;
    const text = long && wide > 34 ? ops.cell[op] : label;
    if (pen.measureText(text).width + 3 > wide) return;
    pen.fillStyle = this.step.ended && !this.step.ended[op] ? this.theme.ink : dark(colour) ? "#fff" : "#15181d";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, left + wide / 2, top + this.row / 2 + 0.5);
  }

  drawLabels(pen) {
    const {step, theme} = this, every = Math.ceil(13 / (this.row + GAP)), busy = step.figures?.busy;
    pen.textBaseline = "middle";
    for (let rank = 0; rank < this.rows.length; rank += every) {
      const middle = this.y(rank) + this.row / 2, twoLines = this.row > 24 && busy;
      pen.textAlign = "left";
      pen.fillStyle = colourOf(rank, this.rows.length);
      pen.beginPath();
      pen.arc(5, twoLines ? middle - 6 : middle, 3.5, 0, 7);
      pen.fill();
      pen.fillStyle = theme.ink;
      pen.font = `12px ${FONT}`;
      pen.fillText("rank " + rank, 13, twoLines ? middle - 6 : middle);
      if (!twoLines) continue;
      pen.fillStyle = theme.soft;
      pen.font = `10.5px ${FONT}`;
      pen.fillText(`${(100 * (1 - busy[rank] / step.figures.makespan)).toFixed(0)} % idle`, 13, middle + 7);
    }
  }

  drawAxis(pen) {
    const {theme, step} = this, every = tick(this.until, this.width / 90);
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "top";
    for (let time = 0; time <= this.until * 1.0001; time += every) {
      const x = this.x(time);
      pen.fillStyle = theme.edge;
      pen.fillRect(x, this.bottom, 1, 5);
      pen.fillStyle = theme.faint;
      pen.textAlign = time === 0 ? "left" : x > this.width - 40 ? "right" : "center";
      pen.fillText(step.ops.start ? duration(time, step.unit) : "", x, this.bottom + 8);
    }
    if (step.ops.start) return;
    pen.textAlign = "left";
    pen.fillText("ops in the order of each rank; pale ones never start", this.x(0), this.bottom + 8);
  }

  drawBound(pen) {
    const x = Math.round(this.x(this.bound.bound)) + 0.5;
    pen.strokeStyle = this.theme.bound;
    pen.lineWidth = 1.5;
    pen.setLineDash([5, 4]);
    line(pen, [[x, 0], [x, this.bottom + 6]]);
    pen.setLineDash([]);
    pen.fillStyle = this.theme.card;
    pen.font = `600 11px ${FONT}`;
    pen.textBaseline = "top";
    const text = "lower bound", wide = pen.measureText(text).width + 8;
    pen.fillRect(x - wide, this.bottom + 7, wide, 15);
    pen.fillStyle = this.theme.bound;
    pen.textAlign = "right";
    pen.fillText(text, x - 4, this.bottom + 8);
  }

  drawMemory(pen, side) {
    const {theme, step} = this, base = this.height - 6, top = base - MEMORY, {unit, ranks} = step.memory;
    const {limit} = step;
    const most = Math.max(...ranks.map(levels => Math.max(0, ...levels.map(level => level[1]))), 1e-9);
    const full = Math.max(most, limit !== null && limit < most * 2.5 ? limit : 0) * 1.06, y = value => base - value / full * MEMORY;
    pen.fillStyle = theme.idle;
    pen.globalAlpha = 0.45;
    pen.fillRect(this.x(0), top, this.x(this.length()) - this.x(0), MEMORY);
    pen.globalAlpha = 1;
    side.font = `11px ${FONT}`;
    side.textAlign = "right";
    side.textBaseline = "middle";
    side.fillStyle = theme.soft;
    side.fillText("memory", LABELS - 8, top - 9);
    side.fillText(memory(most, unit), LABELS - 8, y(most));
    side.fillText("0", LABELS - 8, base);
    const focus = this.selected >= 0 ? step.ops.rank[this.selected] : -1;
    const paint = rank => {
      const points = [];
      let before = ranks[rank].length ? ranks[rank][0][1] : 0;
      points.push([this.x(0), y(before)]);
      for (const [time, level] of ranks[rank]) {
        points.push([this.x(time), y(before)], [this.x(time), y(level)]);
        before = level;
      }
      points.push([this.x(this.length()), y(before)]);
      pen.strokeStyle = colourOf(rank, ranks.length);
      pen.globalAlpha = focus < 0 || rank === focus ? 1 : 0.25;
      pen.lineWidth = rank === focus ? 2.2 : 1.4;
      line(pen, points);
      pen.globalAlpha = 1;
    };
    ranks.forEach((_, rank) => paint(rank));
    if (limit === null || limit > full) return;
    pen.strokeStyle = theme.bad;
    pen.lineWidth = 1.2;
    pen.setLineDash([6, 4]);
    line(pen, [[this.x(0), y(limit)], [this.x(this.length()), y(limit)]]);
    pen.setLineDash([]);
    pen.fillStyle = theme.bad;
    pen.textAlign = "left";
    pen.textBaseline = "bottom";
    pen.fillText(`limit ${memory(limit, unit)}`, this.x(0) + 4, y(limit) - 2);
  }

  drawSelected(pen) {
    const {ops, transfers} = this.step, op = this.selected, cell = ops.cell[op];
    this.outline(pen, op, this.theme.ink, 2);
    for (const [kind, source, target, from, to, producer, consumer] of transfers ?? []) {
      if (source === target || (producer !== cell && consumer !== cell)) continue;
      const down = target > source;
      pen.strokeStyle = this.theme.accent;
      pen.lineWidth = 1.6;
      arrow(pen, [this.x(from), this.y(source) + (down ? this.row : 0)], [this.x(to), this.y(target) + (down ? 0 : this.row)]);
    }
  }

  drawCircle(pen) {
    const middle = op => [(this.x(this.start(op)) + this.x(this.end(op))) / 2, this.y(this.step.ops.rank[op]) + this.row / 2];
    pen.strokeStyle = this.theme.bad;
    for (const [op, other] of this.step.circle) {
      this.outline(pen, op, this.theme.bad, 2);
      pen.lineWidth = 1.8;
      arrow(pen, middle(op), middle(other));
    }
  }

  drawDrag(pen) {
    const {op, by, gap} = this.drag, rank = this.step.ops.rank[op], row = this.rows[rank];
    this.drawOp(pen, op, by || 0.01);
    const x = gap < row.length ? this.x(this.start(row[gap])) : this.x(this.end(row.at(-1)));
    pen.fillStyle = this.theme.accent;
    pen.fillRect(x - 2, this.y(rank) - 3, 3, this.row + 6);
  }

  outline(pen, op, colour, width) {
    const left = this.x(this.start(op)), wide = this.x(this.end(op)) - left;
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.strokeRect(left, this.y(this.step.ops.rank[op]), Math.max(wide - 1, 2), this.row);
  }

  summary() {  // for those who do not see it
    const {figures} = this.step;
    if (!figures) return "Ops of a program that cannot run.";
    return `Timeline of ${figures.schedule}: ${figures.ranks} ranks, ${figures.microbatches} microbatches, step ${duration(figures.makespan, this.step.unit)}, `
      + `bubble ${percent(figures.bubble_ratio)}. Arrow keys go from op to op, Shift with left or right moves one.`;
  }
}

function sized(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 30000 / width);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

function line(pen, points) {
  pen.beginPath();
  points.forEach(([x, y]) => pen.lineTo(x, y));
  pen.stroke();
}

function arrow(pen, from, to) {
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
  line(pen, [from, to]);
  for (const turn of [2.6, -2.6]) line(pen, [to, [to[0] + 8 * Math.cos(angle + turn), to[1] + 8 * Math.sin(angle + turn)]]);
}

function tick(until, count) {  // 1, 2 or 5 times a power of ten
  const least = until / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(factor => factor * power).find(value => value >= least) ?? until;
}

function dark(colour) {
  const [red, green, blue] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

function colourOf(rank, ranks) {
  return `hsl(${Math.round(215 + 250 * rank / Math.max(ranks, 2)) % 360} 62% 52%)`;
}
