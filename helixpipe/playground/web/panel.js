// One schedule: its controls, figures, chart, and the changes of its order.
import {Chart} from "./chart.js";
import {buildControls} from "./controls.js";
import {showCircle, showFigures} from "./figures.js";
import {listen} from "./pointer.js";
import {command, question} from "./state.js";
import {describe} from "./words.js";

export class Panel {
  constructor(page, state, removable) {
    this.page = page;
    this.state = state;
    this.element = document.getElementById("panel").content.cloneNode(true).firstElementChild;
    this.part = selector => this.element.querySelector(selector);
    document.getElementById("panels").append(this.element);
    this.chart = new Chart(this.element, page.choices);
    buildControls(this, removable);
    listen(this);
    this.element.querySelector(".tools").addEventListener("click", event => this.act(event.target.dataset.do));
    new ResizeObserver(() => this.chart.draw()).observe(this.chart.scroller);
  }

  change(changes) {  // of what is chosen; moves belong to the order that was there before
    Object.assign(this.state, changes, "moves" in changes ? {} : {moves: []});
    this.page.changed(this);
  }

  async simulate() {
    const asked = this.asked = question(this.state);
    this.part(".command code").textContent = command(this.state);
    this.element.classList.add("waiting");
    let step;
    try {
      step = await this.page.core.ask("answer", asked);
    } catch (error) {
      step = {error: `The simulation failed: ${error.message}`};
    }
    if (this.asked !== asked) return;
    this.element.classList.remove("waiting");
    this.show(step);
    if (step.error) return;
    const bound = await this.page.core.ask("bound", asked).catch(() => null);
    if (this.asked !== asked) return;
    this.chart.bound = bound;
    showFigures(this, bound);
    this.chart.draw();
  }

  show(step) {
    const selected = this.chart.selected >= 0 ? this.chart.step.ops.cell[this.chart.selected] : "";
    this.error = step.error ?? "";
    this.part(".error").hidden = !step.error;
    this.part(".error").textContent = step.error ?? "";
    this.part(".figures").hidden = Boolean(step.error);
    this.part(".chart").hidden = !step.ops;
    this.chart.bound = null;
    this.chart.selected = -1;
    this.step = step;
    showCircle(this);
    if (step.ops) {
      step.chunked = step.ops.chunk.some(Boolean);
      this.chart.selected = step.ops.cell.indexOf(selected);
    }
    this.page.redraw();
    if (!step.error) showFigures(this, null);
    this.tellSelected();
  }

  select(op) {
    this.chart.selected = op;
    this.chart.draw();
    this.tellSelected();
    if (op < 0) return;
    const {scroller} = this.chart, x = this.chart.x(this.chart.start(op));
    if (x < scroller.scrollLeft || x > scroller.scrollLeft + scroller.clientWidth - 20) scroller.scrollLeft = x - scroller.clientWidth / 2;
  }

  tellSelected() {
    const {chart, state} = this, op = this.step?.ops ? chart.selected : -1;
    const hint = "Select an op, or drag it along its rank to change the order.";
    this.part(".selected").textContent = !this.step?.ops ? "" : op < 0 ? hint : describe(this.step, op) + ".";
    const place = op < 0 ? -1 : chart.place(op), row = op < 0 ? [] : chart.rows[this.step.ops.rank[op]];
    this.button("earlier").disabled = place <= 0;
    this.button("later").disabled = op < 0 || place === row.length - 1;
    this.button("undo").disabled = this.button("reset").disabled = !state.moves.length;
    for (const suffix of [".json", ".csv", ".html"]) this.button(suffix).disabled = Boolean(this.error);
    if (this.step?.ops) chart.canvas.setAttribute("aria-label", chart.summary());
  }

  button(name) { return this.part(`[data-do="${name}"]`); }

  move(op, to) {  // to: the place in its rank's order
    const rank = this.step.ops.rank[op], from = this.chart.place(op), row = this.chart.rows[rank];
    to = Math.min(Math.max(to, 0), row.length - 1);
    if (from !== to) this.change({moves: [...this.state.moves, [rank, from, to]]});
  }

  act(name) {
    const {chart, state} = this, op = chart.selected;
    if (name === "earlier" || name === "later") this.move(op, chart.place(op) + (name === "later" ? 1 : -1));
    else if (name === "undo" && state.moves.length) this.change({moves: state.moves.slice(0, -1)});
    else if (name === "reset") this.change({moves: []});
    else if (name === "wider" || name === "narrower") this.zoom(name === "wider" ? 1.5 : 1 / 1.5);
    else if (name?.startsWith(".")) this.download(name);
  }

  zoom(by) {
    const {chart} = this, {scroller} = chart, middle = (scroller.scrollLeft + scroller.clientWidth / 2) / chart.width;
    chart.zoom = Math.min(Math.max(chart.zoom * by, 1), 40);
    chart.draw();
    scroller.scrollLeft = middle * chart.width - scroller.clientWidth / 2;
  }

  async download(suffix) {
    const file = await this.page.core.ask("file", this.asked, suffix);
    if (file.error) {
      this.part(".selected").textContent = file.error;
      return;
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([file.content], {type: "application/octet-stream"}));
    link.download = this.state.schedule + (this.state.moves.length ? "-edited" : "") + suffix;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  get length() { return this.step?.figures?.makespan ?? 0; }
}
