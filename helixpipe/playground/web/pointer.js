// Pointer and keys on a panel's timeline: pointing tells, a click selects, dragging and Shift with an arrow change the order.
import {describe} from "./words.js";

const FAR = 4;  // pixels from which a press is a drag

export function listen(panel) {
  const {chart} = panel, {canvas} = chart, tip = document.getElementById("tip");
  let press = null;
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", event => {
    if (event.button || !panel.step?.ops) return;
    const [x, y] = place(event), op = chart.at(x, y);
    press = event.pointerType === "touch" || op < 0 ? null : {op, x};
    panel.select(op);
    canvas.focus({preventScroll: true});
    if (press) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!panel.step?.ops) return;
    const [x, y] = place(event);
    if (press && (chart.drag || Math.abs(x - press.x) > FAR)) {
      chart.drag = {op: press.op, by: x - press.x, gap: chart.gapAt(panel.step.ops.rank[press.op], x)};
      canvas.classList.add("dragging");
      tip.hidden = true;
      chart.draw();
    } else showTip(tip, event, panel, chart.at(x, y));
  });
  const end = drop => {
    if (chart.drag && drop) {
      const {op, gap} = chart.drag, from = chart.place(op);
      chart.drag = null;
      panel.move(op, gap > from ? gap - 1 : gap);
    }
    press = chart.drag = null;
    canvas.classList.remove("dragging");
    chart.draw();
  };
  canvas.addEventListener("pointerup", () => end(true));
  canvas.addEventListener("pointercancel", () => end(false));
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("keydown", event => {
    if (!panel.step?.ops) return;
    if (event.key === "Escape" && chart.drag) end(false);
    else if (!key(panel, event)) return;
    event.preventDefault();
  });
}

function key(panel, event) {  // whether it was one of the chart's
  const {chart} = panel, op = chart.selected, {ops} = panel.step;
  const ahead = {ArrowRight: 1, ArrowLeft: -1}[event.key], down = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if ((event.ctrlKey || event.metaKey) && event.key === "z") panel.act("undo");
  else if (event.ctrlKey || event.metaKey || event.altKey) return false;
  else if (event.key === "Escape") panel.select(-1);
  else if (event.key === "+" || event.key === "-") panel.act(event.key === "+" ? "wider" : "narrower");
  else if (!ahead && !down) return false;
  else if (op < 0) panel.select(chart.rows.find(row => row.length)?.[0] ?? -1);
  else if (ahead && event.shiftKey) panel.move(op, chart.place(op) + ahead);
  else if (ahead) panel.select(chart.rows[ops.rank[op]][chart.place(op) + ahead] ?? op);
  else panel.select(nearest(chart, op, ops.rank[op] + down));
  return true;
}

function nearest(chart, op, rank) {  // of another rank, in time
  const middle = each => (chart.start(each) + chart.end(each)) / 2, row = chart.rows[rank] ?? [];
  return row.reduce((best, each) => best === op || Math.abs(middle(each) - middle(op)) < Math.abs(middle(best) - middle(op)) ? each : best, op);
}

function showTip(tip, event, panel, op) {
  tip.hidden = op < 0;
  if (op < 0) return;
  tip.textContent = describe(panel.step, op).replace(": ", "\n").replace("; from", "\nfrom");
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (event.clientY + box.height + 20 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
}
