// The page: one or two panels on one time axis, the state in the address.
import {fit} from "./controls.js";
import {Core} from "./core.js";
import {showFigures} from "./figures.js";
import {Panel} from "./panel.js";
import {decode, encode} from "./state.js";

const element = name => document.getElementById(name);

class Page {
  constructor(core, choices) {
    this.core = core;
    this.choices = choices;
    this.panels = [];
    element("legend").append(...Object.values(choices.kinds).map(({name, colour}) => {
      const item = document.createElement("li"), swatch = document.createElement("i");
      swatch.style.background = colour;
      item.append(swatch, name);
      return item;
    }));
    element("second").addEventListener("click", () => this.add({...this.panels[0].state, moves: [...this.panels[0].state.moves]}));
    element("share").addEventListener("click", () => this.share());
    addEventListener("hashchange", () => { if (location.hash.slice(1) !== encode(this.states())) this.open(location.hash); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  states() { return this.panels.map(panel => panel.state); }

  open(hash) {
    element("panels").replaceChildren();
    this.panels = [];
    for (const state of decode(hash)) this.panels.push(new Panel(this, state, this.panels.length > 0));
    element("second").hidden = this.panels.length > 1;
    return Promise.all(this.panels.map(panel => panel.simulate()));
  }

  add(state) {
    this.panels.push(new Panel(this, state, true));
    this.changed(this.panels.at(-1));
    this.panels.at(-1).element.querySelector("select").focus();
  }

  remove(panel) {
    panel.element.remove();
    this.panels = this.panels.filter(each => each !== panel);
    this.saveState();
    this.redraw();
    this.panels[0].element.querySelector("select").focus();
  }

  changed(panel) {
    fit(panel);
    this.saveState();
    panel.simulate();
  }

  saveState() {
    element("second").hidden = this.panels.length > 1;
    history.replaceState(null, "", "#" + encode(this.states()));
  }

  redraw() {  // panels of one unit share the time axis
    for (const panel of this.panels.filter(each => each.step?.ops)) {
      const {figures, ops, unit} = panel.step;
      const alike = this.panels.filter(each => each.step?.figures && each.step.unit === unit);
      panel.chart.show(panel.step, figures ? Math.max(...alike.map(each => each.length)) * 1.002 : Math.max(...counts(ops.rank)));
      if (figures) showFigures(panel, panel.chart.bound);
    }
  }

  async share() {
    try {
      await navigator.clipboard.writeText(location.href);
      element("shared").textContent = "Copied.";
    } catch {
      element("shared").textContent = "The address of this page is the link.";
    }
  }
}

function counts(ranks) {
  const found = [];
  for (const rank of ranks) found[rank] = (found[rank] ?? 0) + 1;
  return found.filter(Boolean);
}

function status(text, busy) {
  element("status").textContent = text;
  element("status").classList.toggle("busy", busy);
}

async function start() {
  const core = new Core(status), first = await (await fetch("first.json")).json();
  for (const {question, answer, bound} of first.first) {
    core.know("answer", question, answer);
    core.know("bound", question, bound);
  }
  const page = globalThis.page = new Page(core, first.choices);
  await page.open(location.hash);
  document.body.dataset.ready = "yes";
}

start().catch(error => {
  element("failed").hidden = false;
  element("failed").textContent = "This page could not be shown: " + error.message;
});
