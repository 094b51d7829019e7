// The figures of a step, and why a program cannot run.
import {duration, memory, percent, short} from "./words.js";

export function showFigures(panel, bound) {
  const {step, page} = panel, {figures, unit} = step, other = page.panels.find(each => each !== panel && each.step?.figures);
  const items = [["step time", duration(figures.makespan, unit), compared(panel, other)]];
  items.push(["bubble", percent(figures.bubble_ratio), `${duration(figures.bubble_time, unit)} a rank`]);
  const {unit: of, ranks} = step.memory, most = ranks.map(levels => Math.max(0, ...levels.map(level => level[1])));
  const peak = Math.max(...most), where = most.indexOf(peak);
  const limit = step.limit === null ? `rank ${where}${of === "bytes" ? "" : ", microbatch-layers"}`
    : step.fits ? `rank ${where}, within ${memory(step.limit, of)}` : `rank ${where}, more than ${memory(step.limit, of)}`;
  items.push(["peak memory", memory(peak, of), limit, step.limit === null ? "" : step.fits ? "good" : "bad"]);
  if (bound) {
    const gap = bound.gap <= 1e-6 ? "reached: no order is shorter" : `this order: ${percent(bound.gap)} above it`;
    items.push(["lower bound", duration(bound.bound, unit), gap]);
  } else items.push(["lower bound", "…", ""]);
  if (figures.step?.tokens_per_second_per_gpu) items.push(["throughput", short(figures.step.tokens_per_second_per_gpu), "tokens/s a GPU"]);
  const changes = panel.state.moves.length;
  if (changes) items.push(["order", changes === 1 ? "1 move" : `${changes} moves`, "from the schedule's own"]);
  panel.part(".figures").replaceChildren(...items.map(([name, value, note, look]) => {
    const box = document.createElement("div"), term = document.createElement("dt"), figure = document.createElement("dd");
    const small = document.createElement("small");
    term.textContent = name;
    small.textContent = note;
    small.className = look ?? "";
    figure.append(value, small);
    box.append(term, figure);
    return box;
  }));
}

function compared(panel, other) {
  if (!other || other.step.unit !== panel.step.unit) return "simulated";
  const {figures} = panel.step, theirs = other.step.figures;
  if (["ranks", "microbatches", "layers"].some(size => figures[size] !== theirs[size])) return `${other.state.schedule} has another size`;
  const ratio = panel.length / other.length;
  if (Math.abs(ratio - 1) < 5e-4) return `as long as ${other.state.schedule}`;
  return ratio < 1 ? `${percent(1 - ratio)} shorter than ${other.state.schedule}` : `${percent(ratio - 1)} longer than ${other.state.schedule}`;
}

export function showCircle(panel) {
  const list = panel.part(".circle"), {step} = panel;
  list.hidden = !step.circle;
  list.replaceChildren(...(step.circle ?? []).map(([op, other, direct]) => {
    const item = document.createElement("li"), cell = number => {
      const name = document.createElement("b");
      name.textContent = step.ops.cell[number];
      return name;
    };
    const rank = step.ops.rank[op];
    item.append(cell(op), direct ? " needs what " : ` stands on rank ${rank} behind `, cell(other), direct ? " makes" : ", so it has to wait for it");
    return item;
  }));
}
