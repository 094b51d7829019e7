// What can be switched and changed, and what is said of each timeline above it.

function startControls() {
  const {settings, panels} = page, some = test => panels.some(test);
  const switches = [
    ["path", "critical path", some(panel => panel.path.length)],
    ["messages", "messages", some(panel => panel.data.messages?.length)],
    ["links", "links", some(panel => panel.lanes.some(lanes => lanes.some(lane => lane.type === MESSAGE)))],
    ["copies", "copies and gathers", some(panel => panel.lanes.some(lanes => lanes.some(lane => lane.type !== MESSAGE)))],
    ["memory", "memory", some(panel => panel.memory)],
  ];
  for (const [name, label, there] of switches) {
    const box = make("input", {type: "checkbox", checked: settings[name], onchange: event => {
      settings[name] = event.target.checked;
      settingsChanged();
    }});
    box.id = "show-" + name;
    element("switches").append(make("label", {hidden: !there}, box, " " + label));
  }
  element("height").oninput = event => {
    settings.rowHeight = +event.target.value;
    requestDraw();
  };
  element("colour").onchange = event => {
    settings.colour = event.target.value;
    settingsChanged();
  };
  const views = () => Object.values(page.views);
  element("closer").onclick = () => views().forEach(view => zoom(view, 0.7));
  element("farther").onclick = () => views().forEach(view => zoom(view, 1 / 0.7));
  element("all").onclick = () => views().forEach(view => setView(view, 0, view.full));
  settingsChanged();
}

function settingsChanged() {
  element("colours").hidden = !page.panels.some(panel => panel.compared?.alike);
  if (element("colours").hidden) element("colour").value = page.settings.colour = "kind";
  page.limit = differenceLimit();
  legend();
  requestDraw();
}

function differenceLimit() {  // the ratio that has the full colour: all but the 5 % furthest are below it
  const far = page.panels.filter(panel => panel.compared?.alike).flatMap(panel =>
    panel.rows.flat().map(op => Math.abs(Math.log(durationRatio(panel, op)))).filter(isFinite)).sort((a, b) => a - b);
  const most = Math.exp(far[Math.floor(0.95 * far.length)] ?? 0);
  return [1.02, 1.05, 1.1, 1.25, 1.5, 2, 4, 8].find(limit => limit >= most - 1e-9) ?? 16;
}

function legend() {
  const {data, settings, panels, theme} = page, list = element("legend");
  list.replaceChildren();
  const entry = (colour, text) => {
    const swatch = make("span", {className: "swatch"});
    swatch.style.background = colour;
    list.append(make("li", {}, swatch, text));
  };
  const used = new Set(panels.flatMap(panel => [...new Set(panel.ops.kind)]));
  if (settings.colour === "difference") {
    const {limit} = page;
    entry(differenceColour(1 / limit, limit).fill, `takes 1/${limit} as long or less`);
    entry(differenceColour(1, limit).fill, "as long");
    entry(differenceColour(limit, limit).fill, `${limit} × as long or more`);
  }
  if (settings.colour === "kind" || panels.some(panel => !panel.compared?.alike)) for (const kind in data.kinds) if (used.has(kind)) entry(data.kinds[kind].colour, `${kind} ${data.kinds[kind].name}`);
  const has = (type, test = () => true) => panels.some(panel => panel.lanes.some(lanes =>
    lanes.some(lane => lane.type === type && lane.tasks.some(task => test(panel.whatIs(task))))));
  if (settings.copies) {
    data.lanes.forEach((lane, inward) => {
      if (has(COPY, what => what.inward === inward)) entry(lane.colour, `${lane.lane}: ${lane.name}`);
    });
    data.sharing.forEach((style, kind) => { if (has(SHARING, what => what.kind === kind)) entry(style.colour, style.name); });
  }
  if (settings.links) data.links.forEach((style, kind) => {
    if (has(MESSAGE, what => what.kind === kind)) entry(style.colour, style.name);
  });
  const remembered = panels.find(panel => panel.memory);
  if (settings.memory && remembered) {
    const {unit} = remembered.data.memory;
    entry(theme.device, "device memory" + (unit === "bytes" ? "" : ` (${unit})`));
    if (panels.some(panel => panel.memoryTop?.[1])) entry(theme.host, "host memory");
  }
  if (settings.path) entry(theme.bad, "critical path");
  if (panels.some(panel => panel.data.circle)) entry(theme.bad, "waits for (dashed: comes after on its rank)");
  else entry(theme.idle, "idle (its share at the right of each rank" + (settings.memory && remembered ? ", below it the most memory)" : ")"));
}

// --------------------------------------------------------------------------------------------------- what is said

function headingOf(panel) {
  if (panel.data.circle || panel.times === panel.given) return panel.data.heading;
  return `${panel.data.title}: simulated again, makespan ${timeText(panel.span, panel.unit)}, bubble ${percent(panel.bubble)}`;
}

function summaryOf(panel) {  // in words what the picture shows
  if (panel.data.circle) return panel.data.reason[0].toUpperCase() + panel.data.reason.slice(1);
  const {path, times, ops} = panel, kinds = {}, length = task => times.end[task] - times.start[task];
  let others = 0;
  for (const task of path)
    if (task < ops.rank.length) kinds[ops.kind[task]] = (kinds[ops.kind[task]] ?? 0) + length(task);
    else others += length(task);
  const whole = times.makespan || 1, parts = Object.entries(kinds).sort((a, b) => b[1] - a[1])
    .map(([kind, time]) => `${page.data.kinds[kind].name} ${percent(time / whole)}`);
  if (others > whole * 1e-9) parts.push(`transfers ${percent(others / whole)}`);
  const most = panel.idle.indexOf(Math.max(...panel.idle)), least = panel.idle.indexOf(Math.min(...panel.idle));
  const idle = panel.idle[most] - panel.idle[least] < 5e-4 ? `Every rank is idle for ${percent(panel.bubble)} of the step.`
    : `Ranks are idle for ${percent(panel.idle[least])} (rank ${least}) to ${percent(panel.idle[most])} (rank ${most}) of the step.`;
  const said = [idle, `The critical path, ${count(path.length, "task")} long: ${parts.join(", ")}.`];
  if (panel.memory) for (const [i, where] of ["device", "host"].entries()) {
    if (!panel.memoryTop[i]) continue;
    const rank = panel.memory.findIndex(own => own.most[i] === panel.memoryTop[i]), {unit: of} = panel.data.memory;
    said.push(`Most memory on a ${where}: ${memoryText(panel.memoryTop[i], of)}${of === "bytes" ? "" : " " + of} (rank ${rank}).`);
  }
  if (panel.wrong) said.push("This page's simulation differs from the one that made the file: do not trust its times.");
  return said.join(" ");
}

function comparisonOf(panel) {  // with what a timeline is compared with; empty where there is nothing
  const {compared, ops} = panel;
  if (!compared) return "";
  const shared = compared.other && compared.other.unit !== panel.unit;
  const longer = panel.span / (compared.span * (shared ? compared.scale : 1) || 1) - 1, kinds = {};
  const said = [];
  if (!shared) said.push(Math.abs(longer) < 5e-4 ? "as long" : `${percent(Math.abs(longer))} ${longer > 0 ? "longer" : "shorter"}`);
  said.push(`idle ${percent(panel.bubble)}, there ${percent(compared.idle)}`);
  let most = -1, far = 0, missing = 0;
  for (const op of panel.rows.flat()) {
    const twin = compared.twin(op);
    if (twin < 0) {
      missing++;
      continue;
    }
    const sums = kinds[ops.kind[op]] ??= [0, 0], later = startDifference(panel, op);
    sums[0] += panel.times.end[op] - panel.times.start[op];
    sums[1] += (compared.times.end[twin] - compared.times.start[twin]) * compared.scale;
    if (Math.abs(later) > Math.abs(far)) [most, far] = [op, later];
  }
  if (panel.memory && compared.other?.memory && panel.memoryUnit === compared.other.memoryUnit && compared.other.memoryTop[0])
    said.push(`most memory on a device ${ratioText(panel.memoryTop[0] / compared.other.memoryTop[0])} times as much`);
  const ratios = Object.entries(kinds).filter(([, [own, theirs]]) => own || theirs)
    .map(([kind, [own, theirs]]) => `${kind} ${ratioText(own / theirs)} ×`);
  if (ratios.length) said.push((shared ? "as shares of the step, " : "") + `times of ops ${ratios.join(", ")}`);
  if (most >= 0 && !shared && Math.abs(far) > panel.span * 1e-9)
    said.push(`start furthest apart: ${cellOf(panel, most)}, ${timeText(Math.abs(far), panel.unit)} ${far > 0 ? "later" : "earlier"}`);
  if (!compared.alike) said.push("their stages or chunks differ, so their ops do not compare");
  else if (missing) said.push(`${count(missing, "op")} of this one ${missing === 1 ? "is" : "are"} not there`);
  return `Compared with ${compared.name}: ${said.join("; ")}.`;
}

function describe(panel) {
  panel.compared = baseOf(panel);
  panel.title.textContent = headingOf(panel);
  panel.summary.textContent = summaryOf(panel);
  panel.comparison.textContent = comparisonOf(panel);
  panel.comparison.hidden = !panel.comparison.textContent;
  const asGiven = panel.compared?.other?.times === panel.compared?.other?.given;  // it was written for these times
  panel.why.textContent = asGiven && panel.times === panel.given ? panel.data.why : "";
  panel.why.hidden = !panel.why.textContent;
  panel.canvas.setAttribute("aria-label", headingOf(panel) +
    ". Arrow keys go from op to op; w goes to what an op waited for, n to what waits for it, b back; slash finds an op by its name.");
}

// ---------------------------------------------------------------------------------------------------------- what if

function startForm() {
  const {data} = page, form = element("form"), fields = element("knobs");
  element("times").hidden = !data.knobs.length;
  for (const knob of data.knobs) {
    const input = make("input", {type: "number", min: knob.least ?? 0, step: "any", required: true, name: knob.name});
    input.defaultValue = knob.value;
    fields.append(make("label", {}, knob.label, input));
  }
  form.onsubmit = event => {
    event.preventDefault();
    simulateAgain(Object.fromEntries(data.knobs.map(({name}) => [name, form.elements[name].valueAsNumber])));
  };
  form.onreset = () => simulateAgain(Object.fromEntries(data.knobs.map(({name, value}) => [name, value])));
}

function simulateAgain(values) {
  const {data, panels} = page, changed = data.knobs.some(({name, value}) => values[name] !== value), said = [];
  for (const panel of panels.filter(each => each.program.simulated)) {
    const durations = durationsOf(panel.data, data.knobs, values);
    panel.take(changed ? runTasks(panel.program, durations) : panel.given);
    const ratio = panel.span / (panel.givenSpan || 1) - 1;
    said.push(`${panel.data.title}: ${timeText(panel.givenSpan, panel.unit)} → ${timeText(panel.span, panel.unit)} (${signed(ratio)}), ` +
      `bubble ${percent(panel.givenBubble)} → ${percent(panel.bubble)}`);
  }
  element("again").textContent = changed ? said.join("\n") : "As given.";
  panels.forEach(describe);
  fitViews();
  if (page.selected) select(page.selected.panel, page.selected.task, {say: false, move: false});
  if (page.table && element("ops").open) fillTable();
  settingsChanged();
}
