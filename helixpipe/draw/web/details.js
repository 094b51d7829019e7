// What is said of a task: in the tip beside the pointer, in the panel of details, and to a screen reader.

function baseOf(panel) {  // what a timeline is compared with: itself as it was given, or another
  if (panel.data.circle) return null;
  if (panel.times !== panel.given)
    return {name: "the times given", times: panel.given, twin: op => op, scale: 1, span: panel.givenSpan, idle: panel.givenBubble, alike: true};
  const other = page.panels[panel.data.base];
  if (!other) return null;
  const scale = other.unit === panel.unit ? 1 : panel.span / (other.span || 1), alike = other.size === panel.size;
  const twin = op => alike ? other.byCell.get(cellOf(panel, op)) ?? -1 : -1;  // other stages are other work
  return {name: other.data.title, times: other.times, twin, scale, span: other.span, idle: other.bubble, other, alike};
}

function durationRatio(panel, op) {  // of an op's time to that of its twin; NaN where it has none
  const {compared} = panel, twin = compared.twin(op);
  if (twin < 0) return NaN;
  const own = panel.times.end[op] - panel.times.start[op];
  const theirs = (compared.times.end[twin] - compared.times.start[twin]) * compared.scale;
  return theirs ? own / theirs : own ? Infinity : 1;
}

function startDifference(panel, op) {  // how much later than its twin's
  const {compared} = panel, twin = compared.twin(op);
  return twin < 0 ? NaN : panel.times.start[op] - compared.times.start[twin] * compared.scale;
}

function idleBefore(panel, op) {
  const before = panel.program.previous[op];
  return panel.times.start[op] - (before < 0 ? 0 : panel.times.end[before]);
}

function waitText(panel, op) {
  const {program, times, unit} = panel, idle = idleBefore(panel, op), before = program.previous[op];
  if (idle <= panel.span * 1e-9)
    return before < 0 ? "Did not wait: it begins the step." : `Did not wait: it follows ${cellOf(panel, before)} at once.`;
  const last = heldUpBy(program, times, op);
  const told = `Rank ${panel.ops.rank[op]} was idle for ${timeText(idle, unit)} before it`;
  if (last < 0 || last === before) return told + ".";
  const what = panel.whatIs(last), moment = timeText(times.end[last], unit);
  if (what.type === OPS) return `${told}: it waited for ${cellOf(panel, last)}, which ended at ${moment}.`;
  const made = what.type === MESSAGE && what.kind < OF_WEIGHTS ?
    `, which left at ${timeText(times.start[last], unit)} and` : ", which";
  return `${told}: it waited for the ${nameOf(panel, last)}${made} ${what.type === MESSAGE ? "arrived" : "ended"} at ${moment}.`;
}

function slackText(panel, task) {
  if (!panel.slack) return panel.onPath.has(task) ? "On the critical path." : "";
  if (panel.slack[task] <= panel.span * 1e-9) return "Critical: any delay of it makes the step longer.";
  return `Could end ${timeText(panel.slack[task], panel.unit)} later without making the step longer.`;
}

function differenceText(panel, op) {
  if (!panel.compared || panel.compared.twin(op) < 0) return "";
  const {compared, unit} = panel, twin = compared.twin(op), later = startDifference(panel, op);
  const ratio = durationRatio(panel, op), name = compared.name;
  const took = Math.abs(ratio - 1) < 5e-4 ? "takes as long" : isFinite(ratio) ? `takes ${ratio.toPrecision(3)} × as long` : "";
  if (compared.other && compared.other.unit !== unit) return `Compared with ${name}, as shares of their steps: ${took}.`;
  const moved = Math.abs(later) <= panel.span * 1e-9 ? "begins at the same time"
    : `begins ${timeText(Math.abs(later), unit)} ${later > 0 ? "later" : "earlier"}`;
  const there = `${timeText(compared.times.start[twin], unit)} to ${timeText(compared.times.end[twin], unit)}`;
  return `Compared with ${name} (${there}): ${moved}, ${took}.`;
}

function lines(panel, task) {  // name, then what there is to say
  const what = panel.whatIs(task), {times, unit, ops} = panel, isOp = what.type === OPS;
  const when = `${timeText(times.start[task], unit)} to ${timeText(times.end[task], unit)}`;
  const took = `took ${timeText(times.end[task] - times.start[task], unit)}`;
  if (!isOp) return [nameOf(panel, task), `${when}, ${took}`, slackText(panel, task)].filter(Boolean);
  const chunk = panel.data.chunked ? `, chunk ${ops.chunk[task]}` : "";
  const place = `stage ${ops.stage[task]}, microbatch ${ops.microbatch[task]}${chunk}, rank ${ops.rank[task]}`;
  const name = `${cellOf(panel, task)}: ${page.data.kinds[ops.kind[task]].name}`;
  if (panel.data.circle) return [name, place, circleText(panel, task)];
  return [name, place, `${when}, ${took}`, waitText(panel, task), slackText(panel, task), differenceText(panel, task)]
    .filter(Boolean);
}

function circleText(panel, op) {
  const own = panel.data.circle.find(([from]) => from === op);
  if (!own) return panel.data.ended[op] ? "It can run." : "It cannot run either: it waits for the circle.";
  return own[2] ? `Waits for ${cellOf(panel, own[1])}, which cannot run before it has.`
    : `Stands behind ${cellOf(panel, own[1])} in the order of its rank.`;
}

// ------------------------------------------------------------------------------------------------- where it is shown

const element = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name in node && name !== "list") node[name] = value; else node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function showTip(text, x = 0, top = 0, bottom = 0) {  // beside the pointer, above or below the row from top to bottom
  const tip = element("tip"), gap = 6;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.maxHeight = "none";
  const above = top - 2 * gap, below = lowest() - bottom - 2 * gap, {offsetHeight: tall, offsetWidth: wide} = tip;
  const under = tall <= below || below >= above, room = Math.max(0, under ? below : above);
  tip.style.maxHeight = room + "px";
  tip.style.top = (under ? bottom + gap : top - gap - Math.min(tall, room)) + "px";
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - wide - 8)) + "px";
}

function select(panel, task, {say = true, move = true, before = ""} = {}) {  // pin a task: its details stay, and keys go on from it
  page.selected = task < 0 ? null : {panel, task};
  page.hovered = null;
  const box = element("details"), inside = box.contains(document.activeElement);
  box.hidden = !page.selected;
  element("hint").hidden = !!page.selected;
  showTip("");
  if (page.selected) {
    fillDetails(box, panel, task);
    reserveRoom();
    bringIntoView(panel, task, move);
    if (say) element("live").textContent = before + lines(panel, task).map(text => text.replace(/\.$/, "") + ".").join(" ");
  } else page.trail = [];
  if (inside) (page.selected ? box.firstChild : panel.canvas).focus({preventScroll: true});  // what had it is gone
  showRow(panel, task);
  requestDraw();
}

function fillDetails(box, panel, task) {
  const [name, ...rest] = lines(panel, task), {program} = panel;
  const [place, when, ...said] = rest, short = said.length ? [`${place} · ${when}`, said.join(" ")] : rest;
  box.replaceChildren(make("h2", {textContent: `${name} · ${panel.data.title}`, tabIndex: -1}), ...short.map(text => make("p", {}, text)));
  if (!panel.data.circle) {
    box.append(jumps(panel, task));
    box.append(neighbours(panel, "Waits for", program.before[task]));
    box.append(neighbours(panel, "Waited for by", program.after[task]));
  }
  box.append(make("button", {type: "button", textContent: "Close", title: "Close (Esc)", onclick: () => select(panel, -1)}));
}

// ------------------------------------------------------------------------------------------------ from op to op, and back

function behind(panel, task, forward) {  // a message stands for the op behind it; weights come from no op
  const what = task >= 0 ? panel.whatIs(task) : {};
  return what.type === MESSAGE && what.kind < OF_WEIGHTS ? (forward ? what.consumer : what.producer) : task;
}

const causeOf = (panel, task) => behind(panel, heldUpBy(panel.program, panel.times, task), false);

function jump(panel, task, options) {
  if (task === undefined || task < 0) return;
  if (page.selected) page.trail.push(page.selected);
  select(panel, task, options);
}

function goBack() {
  const last = page.trail.pop();
  if (last) select(last.panel, last.task);
}

function jumps(panel, task) {  // buttons to what the task waited for, and to where the reader came from
  const node = make("p", {className: "links", id: "jumps"}), cause = causeOf(panel, task), last = page.trail.at(-1);
  const add = (key, text, onclick) => node.append(
    make("button", {type: "button", "aria-keyshortcuts": key, onclick}, text + " ", make("kbd", {"aria-hidden": "true"}, key)));
  const waited = task >= panel.ops.rank.length || idleBefore(panel, task) > panel.span * 1e-9;
  if (cause >= 0) add("w", `Go to ${nameOf(panel, cause)}, which it ${waited ? "waited for" : "followed at once"}`, () => jump(panel, cause));
  if (last) add("b", `Back to ${nameOf(last.panel, last.task)}` + (last.panel === panel ? "" : ` of ${last.panel.data.title}`), goBack);
  return node;
}

function neighbours(panel, title, tasks) {  // buttons that go there
  const node = make("p", {className: "links"}, make("b", {}, title + ": "), tasks.length ? "" : "nothing");
  for (const task of tasks.slice(0, 24)) {
    const op = behind(panel, task, title !== "Waits for"), {times, unit} = panel;
    const text = op === task ? nameOf(panel, task) : `${cellOf(panel, op)} (${page.data.links[panel.whatIs(task).kind].name}, ` +
      `sent ${timeText(times.start[task], unit)}, arrived ${timeText(times.end[task], unit)})`;
    node.append(make("button", {type: "button", textContent: text, onclick: () => jump(panel, op)}));
  }
  if (tasks.length > 24) node.append(` and ${tasks.length - 24} more`);
  return node;
}

function lowest() {  // where the window ends, or the details begin if they lie below
  const side = element("side");
  return getComputedStyle(side).position === "fixed" ? side.getBoundingClientRect().top : innerHeight;
}

function reserveRoom() {  // at the page's end, for details that lie below; whatever gets the focus is scrolled clear of bars
  const {style} = document.documentElement, bar = element("bar");
  style.setProperty("--docked", Math.ceil(innerHeight - lowest()) + "px");
  style.setProperty("--bar", getComputedStyle(bar).position === "sticky" ? bar.offsetHeight + "px" : "0px");
}

function startSide() {
  const sizes = new ResizeObserver(reserveRoom), side = element("side");
  [side, element("bar"), document.documentElement].forEach(node => sizes.observe(node));
  document.addEventListener("scroll", () => showTip(""), {passive: true});  // the row goes from under the pointer
  side.addEventListener("keydown", event => {  // as in the chart
    if (!page.selected || event.ctrlKey || event.metaKey || event.altKey || !["w", "n", "b", "Escape"].includes(event.key)) return;
    event.preventDefault();
    keysOf(page.selected.panel)[event.key]();
  });
}
