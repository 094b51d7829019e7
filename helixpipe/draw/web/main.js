// The page, when all that it is made of is there.

const page = {data: null, panels: [], views: {}, stale: new Set(), widths: new Map(), frame: 0, selected: null, hovered: null, trail: [], found: {ops: [], at: -1}, theme: {}, table: null,
  settings: {path: false, messages: false, links: false, copies: true, memory: false, colour: "kind", rowHeight: 0}};

async function readData(node) {
  if (node.dataset.encoding === "none") return JSON.parse(node.textContent);
  const bytes = Uint8Array.from(atob(node.textContent), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function fitViews() {  // timelines of one unit zoom together, on one scale that holds the longest
  for (const view of Object.values(page.views)) {
    const whole = view.from === 0 && view.to === view.full;
    view.full = Math.max(...view.panels.map(panel => panel.times.makespan)) || 1;
    if (whole || !view.to || view.to > view.full) Object.assign(view, {from: 0, to: view.full});
  }
  const stuck = page.panels.find(panel => panel.data.circle);
  if (stuck && stuck.view.full > 40) {  // long orders: where the circle is
    const places = stuck.data.circle.map(([op]) => stuck.times.start[op]);
    setView(stuck.view, Math.min(...places) - 2, Math.max(...places) + 3);
  }
}

function addPanel(panel) {
  const canvas = make("canvas", {tabIndex: 0, role: "application"}), id = "panel-" + panel.index;
  const title = make("h2", {id}), summary = make("p", {className: "summary"}), comparison = make("p", {className: "summary"});
  const why = make("p", {className: "summary why"});
  Object.assign(panel, {canvas, title, summary, comparison, why, givenSpan: panel.span, givenBubble: panel.bubble});
  panel.view = page.views[panel.data.circle ? "places" : panel.unit] ??= {from: 0, to: 0, full: 0, panels: []};
  panel.view.panels.push(panel);
  element("panels").append(make("section", {"aria-labelledby": id}, title, summary, comparison, why, canvas));
  describe(panel);
}

async function start() {
  page.data = await readData(element("data"));
  page.panels = page.data.panels.map((data, index) => new Panel(data, index));
  const ranks = page.panels.reduce((sum, panel) => sum + panel.ranks, 0);
  page.settings.memory = ranks <= 16 && page.panels.some(panel => panel.memory && panel.memoryTop[0]);
  element("scale").textContent = page.data.scale && page.data.scale[0].toUpperCase() + page.data.scale.slice(1) + ".";
  readTheme();
  page.panels.forEach(addPanel);
  fitViews();
  startForm();
  startTable();
  startControls();
  startSearch();
  startSide();
  page.panels.forEach(panel => {
    panel.layout(page.settings);
    element("height").value ||= panel.rowHeight;
    listen(panel);
    new ResizeObserver(() => requestDraw([panel])).observe(panel.canvas);
  });
  matchMedia("(prefers-color-scheme: dark)").onchange = () => {
    readTheme();
    settingsChanged();
  };
  document.body.dataset.ready = "yes";
}

if (typeof document !== "undefined") start().catch(error => {
  element("failed").hidden = false;
  element("failed").textContent = "This page could not be shown: " + error.message;
});
