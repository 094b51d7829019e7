// The table of ops: sorted by any column, and of its rows only those in sight are in the document.

const ROW = 26;  // pixels, as in the style sheet

const COLUMNS = [
  {name: "op", of: (panel, op) => op, text: cellOf},
  {name: "kind", of: (panel, op) => panel.ops.kind[op], text: (panel, op) => page.data.kinds[panel.ops.kind[op]].name},
  {name: "rank", of: (panel, op) => panel.ops.rank[op]},
  {name: "stage", of: (panel, op) => panel.ops.stage[op]},
  {name: "microbatch", of: (panel, op) => panel.ops.microbatch[op]},
  {name: "chunk", of: (panel, op) => panel.ops.chunk[op] ?? 0, when: panel => panel.data.chunked},
  {name: "start", of: (panel, op) => panel.times.start[op], time: true},
  {name: "end", of: (panel, op) => panel.times.end[op], time: true},
  {name: "time", of: (panel, op) => panel.times.end[op] - panel.times.start[op], time: true},
  {name: "idle before", of: idleBefore, time: true},
  {name: "waited for", wide: true, of: (panel, op) => heldUpBy(panel.program, panel.times, op),
    text: (panel, op) => waitedFor(panel, op)},
  {name: "slack", of: (panel, op) => panel.slack[op], time: true, when: panel => panel.slack},
  {name: "starts later by", of: startDifference, time: true,
    when: panel => panel.compared?.alike && (panel.compared.other?.unit ?? panel.unit) === panel.unit},
  {name: "times as long", of: durationRatio, text: (panel, op) => ratioText(durationRatio(panel, op)),
    when: panel => panel.compared?.alike},
];

const ratioText = ratio => isFinite(ratio) ? ratio.toFixed(3) : "–";

function waitedFor(panel, op) {
  const last = heldUpBy(panel.program, panel.times, op);
  if (last < 0) return "–";
  const what = panel.whatIs(last);
  if (what.type === MESSAGE && what.kind < OF_WEIGHTS) return `${page.data.links[what.kind].name} of ${cellOf(panel, what.producer)}`;
  return what.type === OPS ? cellOf(panel, last) : nameOf(panel, last);
}

function fillTable() {  // anew, after the timeline, the order or the times have changed
  const table = page.table, panel = page.panels[table.panel];
  table.columns = COLUMNS.filter(column => !column.when || column.when(panel));
  if (!table.columns.some(column => column.name === table.by)) table.by = "start";
  const by = COLUMNS.find(column => column.name === table.by), word = element("filter").value.trim().toLowerCase();
  table.ops = panel.rows.flat().filter(op => !word || cellOf(panel, op).toLowerCase().includes(word) ||
    page.data.kinds[panel.ops.kind[op]].name.startsWith(word) || "rank " + panel.ops.rank[op] === word);
  const keys = new Map(table.ops.map(op => [op, by.of(panel, op)]));
  const compare = (a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return (x < y ? -1 : x > y ? 1 : 0) * table.turn || a - b;
  };
  table.ops.sort(compare);
  const head = element("head");
  head.replaceChildren(...table.columns.map(column => {
    const sorted = column.name === table.by ? (table.turn > 0 ? "ascending" : "descending") : "none";
    const sort = () => {
      table.turn = table.by === column.name ? -table.turn : 1;
      table.by = column.name;
      fillTable();
      [...head.children].find(cell => cell.dataset.name === column.name).firstChild.focus();
    };
    const mark = sorted === "none" ? "" : sorted === "ascending" ? " ▲" : " ▼";
    const cell = make("div", {role: "columnheader", "aria-sort": sorted},
      make("button", {type: "button", onclick: sort}, column.name, make("span", {"aria-hidden": "true"}, mark)));
    cell.dataset.name = column.name;
    return cell;
  }));
  const box = element("table");
  box.style.setProperty("--columns", table.columns.map(own => own.wide ? "minmax(190px, 2fr)" : "minmax(96px, 1fr)").join(" "));
  box.style.setProperty("--wide", table.columns.length * 96 + 94 + "px");
  box.setAttribute("aria-rowcount", table.ops.length + 1);
  box.setAttribute("aria-colcount", table.columns.length);
  element("count").textContent = count(table.ops.length, "op");
  element("body").style.height = table.ops.length * ROW + "px";
  drawTable();
}

function drawTable() {
  const table = page.table, panel = page.panels[table.panel], box = element("table");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4), seen = Math.ceil(box.clientHeight / ROW) + 8;
  box.removeAttribute("aria-activedescendant");
  element("body").replaceChildren(...table.ops.slice(first, first + seen).map((op, index) => {
    const cells = table.columns.map(column => make("div", {role: "gridcell", className: column.text ? "" : "number"},
      column.text ? column.text(panel, op) : column.time ? timeText(column.of(panel, op), panel.unit) : String(column.of(panel, op))));
    const row = make("div", {role: "row", className: "row", "aria-rowindex": first + index + 2}, ...cells);
    row.style.top = (first + index) * ROW + "px";
    row.dataset.op = op;
    const held = page.selected?.panel === panel && page.selected.task === op;
    row.setAttribute("aria-selected", held);
    if (held) box.setAttribute("aria-activedescendant", row.id = "held-row");
    return row;
  }));
}

function showRow(panel, task) {  // the row of an op that was selected elsewhere
  const table = page.table;
  if (!table || !element("ops").open) return;
  const place = task >= 0 && page.panels[table.panel] === panel ? table.ops.indexOf(task) : -1, box = element("table");
  if (place >= 0 && (place * ROW < box.scrollTop || (place + 2) * ROW > box.scrollTop + box.clientHeight))
    box.scrollTop = place * ROW - box.clientHeight / 2;
  drawTable();
}

function startTable() {
  const shown = page.panels.filter(panel => !panel.data.circle), box = element("table");
  element("ops").hidden = !shown.length;
  if (!shown.length) return;
  page.table = {panel: shown[0].index, by: "start", turn: 1, ops: [], columns: []};
  element("which").replaceChildren(...shown.map(panel => make("option", {value: panel.index}, panel.data.title)));
  element("which").parentElement.hidden = shown.length < 2;
  element("which").onchange = event => {
    page.table.panel = +event.target.value;
    fillTable();
  };
  element("filter").oninput = fillTable;
  element("ops").ontoggle = () => { if (element("ops").open) fillTable(); };
  box.onscroll = () => requestAnimationFrame(drawTable);
  element("body").onclick = event => {
    const row = event.target.closest(".row");
    if (row) select(page.panels[page.table.panel], +row.dataset.op);
  };
  box.onkeydown = event => {  // arrow keys go from row to row, as in the chart
    const by = {ArrowDown: 1, ArrowUp: -1}[event.key], panel = page.panels[page.table.panel];
    if (!by || event.target !== box) return;
    event.preventDefault();
    const place = page.selected?.panel === panel ? page.table.ops.indexOf(page.selected.task) : -1;
    const op = page.table.ops[Math.max(0, Math.min(page.table.ops.length - 1, place + by))];
    if (op !== undefined) select(panel, op);
  };
}
